// SPDX-License-Identifier: Apache-2.0
#include "scaler/gradient_ranges.h"

#include "core/cuda_part.h"
#include "core/interception.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "kernels/exponents.h"

#include <fastamp/ops/exponents.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

namespace fastamp::scaler {
namespace {

bool is_countable(const DeviceGradients& seen) {
  if (seen.any_duplicates || !has_kernels(seen.device.type()) || !nothing_watches_calls() ||
      is_captured(seen.device)) {
    return false;
  }
  return std::ranges::all_of(seen.gradients, [](const at::Tensor& gradient) {
    return is_ordinary(gradient) && gradient.layout() == at::kStrided &&
           (gradient.scalar_type() == at::kFloat || gradient.scalar_type() == at::kHalf ||
            gradient.scalar_type() == at::kBFloat16) &&
           (gradient.numel() == 0 || gradient.storage().data() != nullptr);
  });
}

}  // namespace

bool GradientRanges::is_due(std::int64_t pass) {
  return pass < kInterval ? pass == 0 || std::has_single_bit(static_cast<std::uint64_t>(pass))
                          : pass % kInterval == 0;
}

kernels::BlockSample GradientRanges::next_sample(std::int64_t numel) const {
  const auto every = std::clamp<std::int64_t>(numel / kCountedNumel, 1, kGreatestStride);
  return {.every = every, .phase = starts_ % every};
}

void GradientRanges::count(const DeviceGradients& gradients, const at::Tensor& inv_scale) {
  if (!is_countable(gradients)) {
    return;
  }
  if (starting_ >= 0) {
    static std::atomic<std::int64_t> started{0};
    devices_.clear();
    step_ = std::exchange(starting_, -1);
    ++starts_;
    order_ = ++started;
  }
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(at::kLong).device(gradients.device);
  const auto rows = static_cast<std::int64_t>(gradients.gradients.size());
  OnDevice counted{.positions = gradients.positions,
                   .elements = {},
                   .counted = 0,
                   .all = 0,
                   .zeros = at::zeros({rows, 1}, options),
                   .exponents = at::zeros({1, kernels::kExponentColumns}, options),
                   .inv_scale = inv_scale.clone()};
  counted.elements.reserve(gradients.gradients.size());
  for (const auto& gradient : gradients.gradients) {
    counted.elements.push_back(gradient.numel());
    counted.all += gradient.numel();
  }
  const auto sample = next_sample(counted.all);
  for (std::size_t i = 0; i < counted.elements.size(); ++i) {
    auto& elements = counted.elements[i];
    elements = sample.numel_of(static_cast<std::int64_t>(i), elements);
    counted.counted += elements;
  }
  const at::AutoDispatchBelowADInplaceOrView no_versions;
  if (gradients.arrays.empty()) {
    ops::count_exponents_(gradients.gradients, counted.exponents, counted.zeros, sample.every,
                          sample.phase);
  } else {
    const std::optional<at::Tensor> zeros = counted.zeros;
    kernels::count_exponents_cpu({gradients.gradients, counted.exponents, zeros, sample.every,
                                  sample.phase, gradients.arrays});
  }
  devices_.push_back(std::move(counted));
}

void GradientRanges::correct(const at::Tensor& inv_scale) {
  for (auto& counted : devices_) {
    counted.inv_scale = inv_scale.clone();
  }
}

std::vector<GradientRanges::ZerosOnDevice> GradientRanges::zeros() const {
  std::vector<ZerosOnDevice> zeros;
  zeros.reserve(devices_.size());
  for (const auto& counted : devices_) {
    const auto elements = static_cast<double>(std::max<std::int64_t>(counted.counted, 1));
    zeros.push_back(
        {.zeros = counted.zeros, .elements_of_each = static_cast<double>(counted.all) / elements});
  }
  return zeros;
}

GradientRanges::Counts GradientRanges::read() const {
  Counts counts;
  for (const auto& counted : devices_) {
    counts.scale = 1.0 / counted.inv_scale.cpu().item<double>();  // sync: seldom asked for
    const auto zeros = counted.zeros.cpu();                       // sync: the same
    for (std::size_t i = 0; i < counted.positions.size(); ++i) {
      counts.zeros[counted.positions[i]] = {.zeros = zeros.const_data_ptr<std::int64_t>()[i],
                                            .elements = counted.elements[i]};
    }
    counts.elements += counted.all;
    counts.range += NumberRange::of_row(counted.exponents.cpu()[0]);  // sync: the same
  }
  return counts;
}

}  // namespace fastamp::scaler
