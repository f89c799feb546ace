#include "autocast/plain.h"

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

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return !((tensor.key_set() | tls.included_) - tls.excluded_).has_any(kInterceptors) &&
         tensor.layout() == c10::kStrided && (tensor.is_cpu() || tensor.is_cuda()) &&
         !tensor.has_names() && !tensor._fw_grad(/*level=*/0).defined() && !is_observed();
}

bool is_recorded(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.requires_grad() &&
         !c10::impl::tls_is_dispatch_key_excluded(
             c10::getAutogradKeyFromBackend(c10::toBackendComponent(tensor.device().type())));
}

}  // namespace fastamp::autocast
