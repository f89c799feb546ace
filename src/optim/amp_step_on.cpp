// SPDX-License-Identifier: Apache-2.0
#include "optim/amp_step_on.h"

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

AmpStep amp_step_on(const AmpStep& amp_step, c10::Device device) {
  return {.inv_scale = tensor_on(amp_step.inv_scale, device),
          .clip_coef = tensor_on(amp_step.clip_coef, device),
          .found_inf = tensor_on(amp_step.found_inf, device),
          .clip_value = amp_step.clip_value,
          .write_grads = amp_step.write_grads};
}

bool steps_on_host(const AmpStep& amp_step) {
  if (!amp_step.found_inf || !amp_step.found_inf->defined()) {
    return true;
  }
  const at::Tensor& flag = *amp_step.found_inf;
  return flag.is_cpu() && flag.numel() == 1 && flag.item<float>() == 0.0F;
}

}  // namespace fastamp::optim
