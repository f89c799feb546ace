#include "ops/direct.h"

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp::ops {

bool nothing_watches_calls() {
  // Keys that are included anyway, and those that our ops fall through.
  constexpr auto kPassedThrough =
      c10::default_included_set | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - kPassedThrough).empty() &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

}  // namespace fastamp::ops
