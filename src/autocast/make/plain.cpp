#include "autocast/make/plain.h"

#include "core/tensor_kind.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp::autocast {
namespace {

using c10::DispatchKey;

constexpr c10::DispatchKeySet kInterceptors({
    DispatchKey::Python,
    DispatchKey::PythonTLSSnapshot,
    DispatchKey::PythonDispatcher,
    DispatchKey::PreDispatch,
    DispatchKey::Tracer,
    DispatchKey::Functionalize,
    DispatchKey::FuncTorchDynamicLayerFrontMode,
    DispatchKey::FuncTorchDynamicLayerBackMode,
    DispatchKey::FuncTorchGradWrapper,
    DispatchKey::FuncTorchBatched,
    DispatchKey::FuncTorchBatchedDecomposition,
    DispatchKey::FuncTorchVmapMode,
    DispatchKey::Batched,
    DispatchKey::VmapMode,
    DispatchKey::Conjugate,
    DispatchKey::Negative,
    DispatchKey::ZeroTensor,
});

bool is_observed() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

/// A cast made while these act on every op would be wrong, or of no use, once they are gone.
bool is_intercepted(c10::DispatchKeySet keys) {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return ((keys | tls.included_) - tls.excluded_).has_any(kInterceptors);
}

constexpr c10::DispatchKeySet kSubclass({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});

}  // namespace

bool may_be_kept(const at::Tensor& tensor) { return !is_intercepted(tensor.key_set() - kSubclass); }

bool is_ordinary(const at::Tensor& tensor) {
  return fastamp::is_ordinary(tensor) && !is_intercepted({}) &&
         !tensor._fw_grad(/*level=*/0).defined();
}

bool is_plain(const at::Tensor& tensor) { return is_ordinary(tensor) && !is_observed(); }

bool is_recorded(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.requires_grad() &&
         !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutogradFunctionality);
}

}  // namespace fastamp::autocast
