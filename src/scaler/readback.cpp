// SPDX-License-Identifier: Apache-2.0
#include "scaler/readback.h"

#include "scaler/scale_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace fastamp::scaler {

Readback::Readback(const std::vector<at::Tensor>& scalars) {
  const at::NoGradGuard no_grad;
  scalars_.reserve(scalars.size());
  std::vector<c10::Device> devices;
  for (const auto& scalar : scalars) {
    if (is_plain_cpu_scalar(scalar, at::kFloat)) {
      scalars_.push_back({.value = *scalar.const_data_ptr<float>(), .source = {}});
    } else if (!scalar.device().is_cuda()) {
      on_demand_ = true;
      scalars_.push_back({.source = scalar.clone()});
    } else {
      auto host = at::empty({}, at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
      host.copy_(scalar.reshape({}), /*non_blocking=*/true);  // towards the CPU: an event follows
      scalars_.push_back({.source = std::move(host)});
      if (std::ranges::find(devices, scalar.device()) == devices.end()) {
        devices.push_back(scalar.device());
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
  values.reserve(scalars_.size());
  for (const auto& scalar : scalars_) {
    values.push_back(scalar.source.defined() ? scalar.source.item<double>() : scalar.value);
  }
  return values;
}

}  // namespace fastamp::scaler
