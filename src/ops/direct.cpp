#include "ops/direct.h"

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp::ops {

bool is_ordinary_cpu(const at::Tensor& tensor) {
  constexpr auto kOrdinary =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                           c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU});
  const auto keys = tensor.key_set();
  return keys.has_backend(c10::BackendComponent::CPUBit) && (keys | kOrdinary) == kOrdinary;
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
