// SPDX-License-Identifier: Apache-2.0
#include "kernels/amp_args.h"

namespace fastamp::kernels {

NormResults norm_results(const UnscaleArgs& args) {
  return {mutable_pointer<double>(args.sum_of_squares), nullptr, nullptr, 0.0F};
}

NormResults norm_results(const NormArgs& args) {
  return {args.sum_of_squares.mutable_data_ptr<double>(), mutable_pointer<float>(args.total_norm),
          mutable_pointer<float>(args.clip_coef), static_cast<float>(args.max_norm.value_or(0.0))};
}

ScaleUpdate scale_update(const UpdateScaleArgs& args) {
  const auto* const norm = find_tensor(args.norm);
  const auto* const history_rows = find_tensor(args.history);
  const auto* const new_scale = find_tensor(args.new_scale);
  const bool precise = norm != nullptr && norm->scalar_type() == at::kDouble;
  const ScaleHistory history{mutable_pointer<float>(args.history),
                             history_rows == nullptr ? 0 : history_rows->size(0),
                             mutable_pointer<std::int64_t>(args.history_count),
                             norm == nullptr || precise ? nullptr : norm->const_data_ptr<float>(),
                             precise ? norm->const_data_ptr<double>() : nullptr};
  const UpdateScale rule{args.growth_factor,
                         args.backoff_factor,
                         args.growth_interval,
                         static_cast<std::int32_t>(args.hysteresis),
                         args.min_scale.has_value(),
                         args.max_scale.has_value(),
                         static_cast<float>(args.min_scale.value_or(0.0)),
                         static_cast<float>(args.max_scale.value_or(0.0)),
                         args.fast_growth_interval};
  return {rule,
          args.scale.mutable_data_ptr<float>(),
          args.growth_tracker.mutable_data_ptr<std::int32_t>(),
          mutable_pointer<std::int32_t>(args.hysteresis_tracker),
          args.found_inf.const_data_ptr<float>(),
          mutable_pointer<float>(args.inv_scale),
          history,
          new_scale == nullptr ? nullptr : new_scale->const_data_ptr<float>(),
          mutable_pointer<float>(args.fast_growth_limit)};
}

}  // namespace fastamp::kernels
