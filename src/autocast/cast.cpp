#include "autocast/cast.h"

#include "autocast/cast_cache.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp::autocast {
namespace {

using c10::DispatchKey;

/// Keys whose owners want to see, wrap or transform the cast: subclasses, modes, functorch,
/// functionalization.
constexpr c10::DispatchKeySet kInterceptors({
    DispatchKey::Python,
    DispatchKey::PythonTLSSnapshot,
    DispatchKey::PythonDispatcher,
    DispatchKey::PreDispatch,
    DispatchKey::Functionalize,
    DispatchKey::FuncTorchDynamicLayerFrontMode,
    DispatchKey::FuncTorchDynamicLayerBackMode,
    DispatchKey::FuncTorchGradWrapper,
    DispatchKey::FuncTorchBatched,
    DispatchKey::FuncTorchBatchedDecomposition,
    DispatchKey::FuncTorchVmapMode,
    DispatchKey::Conjugate,
    DispatchKey::Negative,
    DispatchKey::ZeroTensor,
});

/// An ordinary dense tensor in ordinary eager execution.
bool is_plain(const at::Tensor& tensor) {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return tensor.layout() == c10::kStrided &&
         !((tensor.key_set() | tls.included_) - tls.excluded_).has_any(kInterceptors);
}

at::Tensor to_copy(const at::Tensor& tensor, c10::ScalarType to) {
  return at::_ops::_to_copy::call(tensor, to, std::nullopt, std::nullopt, std::nullopt,
                                  /*non_blocking=*/false, std::nullopt);
}

/// torch's rule for what is worth keeping: a float32 parameter.
bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
         !tensor.is_view() && !tensor.is_inference();
}

at::Tensor cast_and_keep(const at::Tensor& weight, c10::ScalarType to) {
  at::Tensor out = to_copy(weight, to);
  keep_weight_cast(weight, to, out);
  return out;
}

at::Tensor cast_weight(const at::Tensor& weight, c10::ScalarType to) {
  if (c10::InferenceMode::is_enabled()) {
    // An inference tensor has no version to tell whether it was edited, and is of no use once the
    // mode is left.
    const c10::InferenceMode normal_mode(false);
    const at::NoGradGuard no_grad;
    return cast_and_keep(weight, to);
  }
  return cast_and_keep(weight, to);
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, c10::ScalarType to, c10::ScalarType lower) {
  if (to == lower) {
    // Looked up before asking whether it is a weight at all: a hit answers that, and hits are the
    // common case.
    if (const at::Tensor* kept = find_weight_cast(tensor, to)) {
      return *kept;
    }
  }
  if (!is_plain(tensor)) {
    return at::_ops::to_dtype::call(tensor, to, /*non_blocking=*/false, /*copy=*/false,
                                    std::nullopt);
  }
  if (to == lower && is_weight(tensor)) {
    return cast_weight(tensor, to);
  }
  return to_copy(tensor, to);
}

}  // namespace fastamp::autocast
