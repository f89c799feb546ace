#include "ops/direct.h"

#include "core/tensor_kind.h"
#include "ops/checks.h"

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

void unscale_and_check_cpu(const kernels::UnscaleArgs& args) {
  check_unscale(args);
  kernels::unscale_and_check_cpu(args);
}

void norm_and_check_cpu(const kernels::NormArgs& args) {
  check_norm(args);
  kernels::norm_and_check_cpu(args);
}

}  // namespace fastamp::ops
