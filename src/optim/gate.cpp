// SPDX-License-Identifier: Apache-2.0
#include "optim/gate.h"

#include "core/device_copy.h"

namespace fastamp::optim {
namespace {

std::optional<at::Tensor> tensor_on(const std::optional<at::Tensor>& tensor, c10::Device device) {
  if (!tensor || !tensor->defined()) {
    return std::nullopt;
  }
  return on_device(*tensor, device, tensor->scalar_type());
}

}  // namespace

StepGate gate_on(const StepGate& gate, c10::Device device) {
  return {.inv_scale = tensor_on(gate.inv_scale, device),
          .clip_coef = tensor_on(gate.clip_coef, device),
          .found_inf = tensor_on(gate.found_inf, device),
          .clip_value = gate.clip_value,
          .write_grads = gate.write_grads};
}

bool steps_on_host(const StepGate& gate) {
  if (!gate.found_inf || !gate.found_inf->defined()) {
    return true;
  }
  const at::Tensor& flag = *gate.found_inf;
  return flag.is_cpu() && flag.numel() == 1 && flag.item<float>() == 0.0F;
}

}  // namespace fastamp::optim
