// SPDX-License-Identifier: Apache-2.0
#include "scaler/readback.h"

#include "core/tensor_kind.h"
#include "scaler/scale_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fastamp::scaler {

Readback::Readback(const std::vector<at::Tensor>& numbers) {
  const at::NoGradGuard no_grad;
  sources_.reserve(numbers.size());
  for (const auto& number : numbers) {
    if (is_plain_cpu_scalar(number, at::kFloat)) {
      sources_.push_back({.from = number, .tensor = {}});
    } else if (!number.device().is_cuda()) {
      on_demand_ = on_demand_ || number.dim() != 1 || !is_ordinary_cpu(number);
      sources_.push_back({.from = number, .tensor = at::empty_like(number)});
    } else {
      const auto options = at::TensorOptions().dtype(number.scalar_type()).pinned_memory(true);
      sources_.push_back(
          {.from = number.reshape({-1}), .tensor = at::empty({number.numel()}, options)});
      if (std::ranges::find(devices_, number.device()) == devices_.end()) {
        devices_.push_back(number.device());
        events_.emplace_back(number.device().type());
      }
    }
  }
}

void Readback::start() {
  const at::NoGradGuard no_grad;
  for (auto& source : sources_) {
    const auto from = std::exchange(source.from, at::Tensor());
    if (source.tensor.defined()) {
      source.tensor.copy_(from, /*non_blocking=*/true);  // towards the CPU: an event follows
    } else {
      source.value = *from.const_data_ptr<float>();
    }
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    const c10::impl::VirtualGuardImpl guard(devices_[i].type());
    events_[i].record(guard.getStream(devices_[i]));
  }
}

bool Readback::ready() const {
  return !on_demand_ &&
         std::ranges::all_of(events_, [](const c10::Event& event) { return event.query(); });
}

std::vector<double> Readback::values() const {
  for (const auto& event : events_) {
    event.synchronize();  // sync: usually over, since a step lies between start and use
  }
  std::vector<double> values;
  values.reserve(sources_.size());
  for (const auto& source : sources_) {
    if (!source.tensor.defined()) {
      values.push_back(source.value);
    } else if (source.tensor.numel() == 1) {
      values.push_back(source.tensor.item<double>());
    } else if (is_ordinary_cpu(source.tensor) && source.tensor.scalar_type() == at::kFloat) {
      const auto* const begin = source.tensor.const_data_ptr<float>();
      values.insert(values.end(), begin, begin + source.tensor.numel());
    } else {
      const auto doubles = source.tensor.to(at::kDouble);
      const auto* const begin = doubles.const_data_ptr<double>();
      values.insert(values.end(), begin, begin + doubles.numel());
    }
  }
  return values;
}

}  // namespace fastamp::scaler
