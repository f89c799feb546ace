// SPDX-License-Identifier: Apache-2.0
#include "core/interception.h"

#include "core/tensor_kind.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp {

bool is_intercepted(c10::DispatchKeySet keys) {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return ((keys | tls.included_) - tls.excluded_).has_any(detail::kInterceptors);
}

bool is_intercepted_except(c10::DispatchKeySet keys) {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return (tls.included_ - tls.excluded_ - keys).has_any(detail::kInterceptors);
}

bool is_seen_by_modes_alone(const at::Tensor& tensor) {
  return is_ordinary(tensor) && !is_intercepted_except(c10::python_ks) &&
         !tensor._fw_grad(/*level=*/0).defined();
}

bool is_observed() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

CallPath call_path(const at::Tensor& tensor) {
  if (!is_ordinary(tensor) || is_intercepted() || tensor._fw_grad(/*level=*/0).defined()) {
    return CallPath::kIntercepted;
  }
  return is_observed() ? CallPath::kObserved : CallPath::kDirect;
}

}  // namespace fastamp
