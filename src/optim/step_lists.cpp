// SPDX-License-Identifier: Apache-2.0
#include "optim/step_lists.h"

#include "core/device_copy.h"

#include <ATen/ops/scalar_tensor.h>

#include <optional>

namespace fastamp::optim {
namespace {

std::optional<at::Tensor> tensor_on(const std::optional<at::Tensor>& tensor, c10::Device device) {
  if (!tensor || !tensor->defined()) {
    return std::nullopt;
  }
  return on_device(*tensor, device, tensor->scalar_type());
}

}  // namespace

void DeviceLists::reserve(std::size_t count) {
  params.reserve(count);
  grads.reserve(count);
}

void DeviceLists::open_group(std::size_t index, double rate, const at::Tensor& rate_tensor) {
  open = index;
  group_sizes.push_back(0);
  lr.push_back(rate);
  lr_tensors.push_back(rate_tensor);
  any_lr_tensor = any_lr_tensor || rate_tensor.defined();
}

void DeviceLists::insert_params(PointerSet& known) const {
  for (const auto& param : params.list()) {
    known.insert(param.unsafeGetTensorImpl());
  }
}

std::vector<at::Tensor> DeviceLists::learning_rates() const {
  std::vector<at::Tensor> rates;
  if (!any_lr_tensor) {
    return rates;
  }
  for (std::size_t i = 0; i < lr.size(); ++i) {
    const at::Tensor& given = lr_tensors[i];
    if (!given.defined()) {
      rates.push_back(at::scalar_tensor(lr[i], at::TensorOptions(at::kDouble)));
      continue;
    }
    const bool float_or_double =
        given.scalar_type() == at::kFloat || given.scalar_type() == at::kDouble;
    const auto where = given.is_cpu() ? given.device() : device;
    rates.push_back(on_device(given, where, float_or_double ? given.scalar_type() : at::kDouble));
  }
  return rates;
}

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
