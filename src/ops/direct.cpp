#include "ops/direct.h"

#include "core/tensor_kind.h"

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp::ops {

bool is_ordinary_cpu(const at::Tensor& tensor) {
  return is_ordinary(tensor) && tensor.key_set().has_backend(c10::BackendComponent::CPUBit);
}

bool nothing_watches_calls() {
  // Keys that are included anyway, and those that our ops fall through.
  constexpr auto kPassedThrough =
      c10::default_included_set | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - kPassedThrough).empty() &&
         !(at::hasCallbacks() && at::isRecordFunctionEnabled());
}

}  // namespace fastamp::ops
