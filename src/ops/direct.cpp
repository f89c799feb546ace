// SPDX-License-Identifier: Apache-2.0
#include "ops/direct.h"

#include "core/interception.h"
#include "core/tensor_kind.h"
#include "ops/checks.h"

#include <c10/core/DispatchKeySet.h>

namespace fastamp::ops {

bool is_ordinary_cpu(const at::Tensor& tensor) {
  return is_ordinary(tensor) && tensor.key_set().has_backend(c10::BackendComponent::CPUBit);
}

bool nothing_watches_calls() { return !is_intercepted() && !is_observed(); }

void unscale_and_check_cpu(const kernels::UnscaleArgs& args) {
  check_unscale(args);
  kernels::unscale_and_check_cpu(args);
}

void norm_and_check_cpu(const kernels::NormArgs& args) {
  check_norm(args);
  kernels::norm_and_check_cpu(args);
}

}  // namespace fastamp::ops
