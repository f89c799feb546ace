// SPDX-License-Identifier: Apache-2.0
#include "optim/kernel_check.h"

#include "core/dtypes.h"
#include "core/kernel_devices.h"

namespace fastamp::optim {

bool has_kernel(const at::Tensor& param) {
  const auto dtype = param.scalar_type();
  return (dtype == at::kFloat || fastamp::is_16_bit(dtype)) && param.layout() == at::kStrided &&
         has_kernels_or_meta(param.device().type());
}

bool KernelCheck::look(const at::Tensor& param) {
  if (!has_kernel(param)) {
    return false;
  }
  keys_ = param.key_set();
  dtype_ = param.dtype();
  is_16_bit_ = fastamp::is_16_bit(param);
  return true;
}

}  // namespace fastamp::optim
