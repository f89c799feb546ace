#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>
#include <type_traits>

// Who stands between the call of an op and the kernel of its device? Whoever does the work of an op
// without calling it asks here first: what subclasses, modes, functorch, tracers and profilers want
// to see or to change would pass them by.
namespace fastamp {

namespace detail {

/// Everything but kinds of memory, autograd and autocast, so that what a later torch adds is among
/// them.
constexpr c10::DispatchKeySet make_interceptors() {
  using c10::DispatchKey;
  auto keys = c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
              c10::DispatchKeySet(
                  {DispatchKey::Dense, DispatchKey::Quantized, DispatchKey::MkldnnCPU,
                   DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::NestedTensor,
                   DispatchKey::BackendSelect, DispatchKey::Named, DispatchKey::ADInplaceOrView}) -
              c10::autograd_dispatch_keyset - c10::autocast_dispatch_keyset;
  using Index = std::underlying_type_t<c10::BackendComponent>;
  for (Index i = 1; i <= static_cast<Index>(c10::BackendComponent::EndOfBackendKeys); ++i) {
    keys = keys.remove_backend(static_cast<c10::BackendComponent>(i));
  }
  return keys;
}

/// The keys of those who see, wrap or transform the ops they are asked about.
inline constexpr c10::DispatchKeySet kInterceptors = make_interceptors();

}  // namespace detail

/// Whether a tensor intercepts the ops it is given to, wherever they are called: a Python subclass,
/// a wrapper of functorch or functionalization, one that is still to be conjugated or negated.
inline bool intercepts_ops(const at::Tensor& tensor) {
  return tensor.key_set().has_any(detail::kInterceptors);
}

/// Whether anybody but a profiler intercepts a call that this thread makes now with tensors of
/// these keys: one of them or, which is all that is asked without keys, a mode, a level of
/// functorch or a tracer of the thread.
bool is_intercepted(c10::DispatchKeySet keys = {});

/// Whether anybody but a profiler, and but the holders of these keys, intercepts all calls that
/// this thread makes now.
bool is_intercepted_except(c10::DispatchKeySet keys);

/// Whether a profiler, or another observer of torch's record_function, watches the ops of this
/// thread.
bool is_observed();

/// What a call with a tensor, made on this thread now, meets before the kernel of its device.
enum class CallPath : std::uint8_t {
  direct,       ///< Autograd and autocast at most.
  observed,     ///< Besides, somebody who watches; the results are the same.
  intercepted,  ///< Somebody who changes what is done, or the tensor is no ordinary one.
};

/// An ordinary tensor is that of core/tensor_kind.h; with a forward-mode tangent it is none here.
CallPath call_path(const at::Tensor& tensor);

/// Whether an op on this tensor may be computed without a call of it.
inline bool can_bypass_dispatcher(const at::Tensor& tensor) {
  return call_path(tensor) == CallPath::direct;
}

}  // namespace fastamp
