#include "ops/direct.h"

#include "core/interception.h"
#include "core/tensor_kind.h"

#include <c10/core/DispatchKeySet.h>

namespace fastamp::ops {

bool is_ordinary_cpu(const at::Tensor& tensor) {
  return is_ordinary(tensor) && tensor.key_set().has_backend(c10::BackendComponent::CPUBit);
}

bool nothing_watches_calls() { return !is_intercepted() && !is_observed(); }

}  // namespace fastamp::ops
