// SPDX-License-Identifier: Apache-2.0
#include "scaler/readback.h"

#include "core/tensor_kind.h"
#include "scaler/scale_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace fastamp::scaler {

Readback::Readback(const std::vector<at::Tensor>& numbers) {
  const at::NoGradGuard no_grad;
  sources_.reserve(numbers.size());
  std::vector<c10::Device> devices;
  for (const auto& number : numbers) {
    if (is_plain_cpu_scalar(number, at::kFloat)) {
      sources_.push_back({.value = *number.const_data_ptr<float>(), .tensor = {}});
    } else if (!number.device().is_cuda()) {
      on_demand_ = on_demand_ || number.dim() != 1 || !is_ordinary_cpu(number);
      sources_.push_back({.tensor = number.clone()});
    } else {
      auto host = at::empty({number.numel()},
                            at::TensorOptions().dtype(number.scalar_type()).pinned_memory(true));
      host.copy_(number.reshape({-1}), /*non_blocking=*/true);  // towards the CPU: an event follows
      sources_.push_back({.tensor = std::move(host)});
      if (std::ranges::find(devices, number.device()) == devices.end()) {
        devices.push_back(number.device());
      }
    }
  }
  for (const auto device : devices) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    events_.emplace_back(device.type()).record(guard.getStream(device));
  }
}

bool Readback::ready() const {
  return !on_demand_ &&
         std::ranges::all_of(events_, [](const c10::Event& event) { return event.query(); });
}

std::vector<double> Readback::values() {
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
    } else {
      const auto doubles = source.tensor.to(at::kDouble);
      const auto* const begin = doubles.const_data_ptr<double>();
      values.insert(values.end(), begin, begin + doubles.numel());
    }
  }
  return values;
}

}  // namespace fastamp::scaler
