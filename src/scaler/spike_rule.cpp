// SPDX-License-Identifier: Apache-2.0
#include "scaler/spike_rule.h"

#include "core/device_copy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace fastamp::scaler {
namespace {

constexpr std::int64_t kLargestWindow = 65536;
constexpr std::int64_t kNormsBeforeSpikes = 16;

}  // namespace

SpikeRule::SpikeRule(const char* function, const SpikeOptions& options) : options_(options) {
  TORCH_CHECK_VALUE(std::isfinite(options.factor) && options.factor > 1.0, function,
                    ": expected spike_factor to be a finite number above 1, got ", options.factor);
  TORCH_CHECK_VALUE(options.window >= 2 && options.window <= kLargestWindow, function,
                    ": expected 2 <= spike_window <= ", kLargestWindow, ", got ", options.window);
}

void SpikeRule::prepare(c10::Device device) {
  if (values_.defined() && values_.device() == device) {
    return;
  }
  if (values_.defined()) {
    values_ = on_device(values_, device, at::kFloat);
    count_ = on_device(count_, device, at::kLong);
    return;
  }
  const bool mean = options_.of == SpikeOf::kMean;
  auto values = start_.norms;
  values.resize(mean ? 1 : static_cast<std::size_t>(options_.window),
                mean ? 0.0 : std::numeric_limits<double>::infinity());
  values_ = on_device(at::tensor(values, at::kFloat), device, at::kFloat);
  count_ = at::full({1}, start_.count, at::TensorOptions(at::kLong).device(device));
}

at::Tensor SpikeRule::typical() const {
  if (options_.of == SpikeOf::kMean) {
    return values_;
  }
  const auto sorted = std::get<0>(values_.sort());
  const auto last = count_.clamp(1, options_.window) - 1;
  return sorted.index_select(0, last.bitwise_right_shift(1));
}

void SpikeRule::judge(const at::Tensor& norm, std::vector<at::Tensor>& flags) {
  const at::NoGradGuard no_grad;
  prepare(norm.device());
  const auto given = norm.to(at::kFloat).reshape({1});
  const auto bound = typical() * options_.factor;
  const auto warm = count_ >= std::min(options_.window, kNormsBeforeSpikes);
  const auto spike = warm.logical_and(given > bound);
  for (auto& flag : flags) {
    const auto is_raised = on_device(spike, flag.device(), at::kBool).reshape(flag.sizes());
    flag.masked_fill_(is_raised, 1.0);
  }
  take_in(given, at::where(warm, at::minimum(given, bound), given));
}

void SpikeRule::take_in(const at::Tensor& norm, const at::Tensor& bounded) {
  const auto finite = at::isfinite(norm);
  if (options_.of == SpikeOf::kMean) {
    const auto weight = (count_ + 1).clamp_max(options_.window);
    values_ = at::where(finite, values_ + (bounded - values_) / weight, values_);
  } else {
    const auto slots = at::arange(options_.window, count_.options());
    const auto hit = slots.eq(count_.remainder(options_.window)).logical_and(finite);
    values_ = at::where(hit, norm, values_);
  }
  count_ = count_ + finite.to(at::kLong);
}

SpikeState SpikeRule::state() const {
  if (!values_.defined()) {
    return start_;
  }
  SpikeState state;
  state.count = count_.item<std::int64_t>();  // sync: a checkpoint is made
  const auto host = on_device(values_, at::kCPU, at::kDouble);
  const auto filled = options_.of == SpikeOf::kMean ? std::min<std::int64_t>(state.count, 1)
                                                    : std::min(state.count, options_.window);
  const auto* const first = host.const_data_ptr<double>();
  state.norms.assign(first, first + filled);
  return state;
}

void SpikeRule::load(const char* function, SpikeState state) {
  const auto most = options_.of == SpikeOf::kMean ? std::int64_t{1} : options_.window;
  const auto wanted = std::min(std::max<std::int64_t>(state.count, 0), most);
  TORCH_CHECK_VALUE(state.count >= 0 && std::cmp_equal(state.norms.size(), wanted), function,
                    ": expected norms of the guard's spike_of and spike_window, which are ", wanted,
                    " after a count of ", state.count, ", got ", state.norms.size());
  for (const double norm : state.norms) {
    TORCH_CHECK_VALUE(std::isfinite(norm) && norm >= 0.0, function,
                      ": expected finite norms of at least 0, got ", norm);
  }
  start_ = std::move(state);
  values_ = count_ = at::Tensor();
}

}  // namespace fastamp::scaler
