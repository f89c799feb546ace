// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/norm.h"
#include "kernels/functors/scale_record.h"
#include "kernels/host_array.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace fastamp::kernels {

/// Arguments of fastamp::unscale_and_check_, in the order of its schema, so that they
/// initialise it as they come.
struct UnscaleArgs {
  at::TensorList grads;
  const at::Tensor& inv_scale;
  const at::Tensor& found_inf;
  const std::optional<at::Tensor>& sum_of_squares;
  const std::optional<at::Tensor>& non_finite_counts;
  bool overwrite_found_inf = false;
  KnownArrays arrays = {};
};

/// Arguments of fastamp::norm_and_check_.
struct NormArgs {
  at::TensorList grads;
  const at::Tensor& inv_scale;
  const at::Tensor& found_inf;
  const at::Tensor& sum_of_squares;
  const std::optional<at::Tensor>& non_finite_counts;
  std::optional<double> max_norm;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& total_norm;
  bool overwrite_found_inf = false;
  KnownArrays arrays = {};
};

/// Arguments of fastamp::update_scale_.
struct UpdateScaleArgs {
  const at::Tensor& scale;
  const at::Tensor& growth_tracker;
  const at::Tensor& found_inf;
  double growth_factor;
  double backoff_factor;
  std::int64_t growth_interval;
  const std::optional<at::Tensor>& hysteresis_tracker;
  std::int64_t hysteresis;
  std::optional<double> min_scale;
  std::optional<double> max_scale;
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& norm;
  const std::optional<at::Tensor>& history;
  const std::optional<at::Tensor>& history_count;
  const std::optional<at::Tensor>& new_scale;
  const std::optional<at::Tensor>& fast_growth_limit;
  std::int64_t fast_growth_interval;
};

/// The tensor, or null for None.
inline const at::Tensor* find_tensor(const std::optional<at::Tensor>& t) {
  return t.has_value() && t->defined() ? &*t : nullptr;
}

inline bool given(const std::optional<at::Tensor>& t) { return find_tensor(t) != nullptr; }

/// Address of what is written, or null for None.
template <typename T>
T* mutable_pointer(const std::optional<at::Tensor>& t) {
  const auto* const tensor = find_tensor(t);
  return tensor == nullptr ? nullptr : tensor->mutable_data_ptr<T>();
}

/// Writes the flag of a call whose answer the host knows.
template <typename Args>
void write_found_inf(const Args& args, bool non_finite) {
  if (non_finite || args.overwrite_found_inf) {
    *args.found_inf.template mutable_data_ptr<float>() = non_finite ? 1.0F : 0.0F;
  }
}

/// Returns where a call writes the norm.
NormResults norm_results(const UnscaleArgs& args);
NormResults norm_results(const NormArgs& args);

/// A call with the addresses of its tensors.
ScaleUpdate scale_update(const UpdateScaleArgs& args);

/// The ops on a device. The arguments have passed the checks of their op (src/ops).
void unscale_and_check_cpu(const UnscaleArgs& args);
void unscale_and_check_cuda(const UnscaleArgs& args);
void norm_and_check_cpu(const NormArgs& args);
void norm_and_check_cuda(const NormArgs& args);
void update_scale_cpu(const UpdateScaleArgs& args);
void update_scale_cuda(const UpdateScaleArgs& args);

}  // namespace fastamp::kernels
