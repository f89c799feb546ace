// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>
#include <type_traits>

// What lies between the call of an op and the kernel of its device? Code that does the work of an
// op without calling it asks here first: subclasses, modes, functorch, tracers and profilers would
// neither see that work nor be able to change it.
namespace fastamp {

/// The key of tensors with names; none in LibTorch 2.15, which has no such tensors.
template <typename Key = c10::DispatchKey>
constexpr c10::DispatchKeySet named_key() {
  if constexpr (requires { Key::Named; }) {
    return c10::DispatchKeySet(Key::Named);
  }
  return {};
}

namespace detail {

/// All keys except those for kinds of memory, autograd and autocast: keys that a later torch adds
/// count as interceptors.
constexpr c10::DispatchKeySet make_interceptors() {
  using c10::DispatchKey;
  auto keys =
      c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
      c10::DispatchKeySet({DispatchKey::Dense, DispatchKey::Quantized, DispatchKey::MkldnnCPU,
                           DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::NestedTensor,
                           DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView}) -
      named_key() - c10::autograd_dispatch_keyset - c10::autocast_dispatch_keyset;
  using Index = std::underlying_type_t<c10::BackendComponent>;
  for (Index i = 1; i <= static_cast<Index>(c10::BackendComponent::EndOfBackendKeys); ++i) {
    keys = keys.remove_backend(static_cast<c10::BackendComponent>(i));
  }
  return keys;
}

/// The keys whose kernels see, wrap or transform ops.
inline constexpr c10::DispatchKeySet kInterceptors = make_interceptors();

}  // namespace detail

/// Whether a tensor intercepts the ops it is given to, wherever they are called: a Python subclass,
/// a wrapper of functorch or functionalization, a tensor whose conjugation or negation is pending.
inline bool intercepts_ops(const at::Tensor& tensor) {
  return tensor.key_set().has_any(detail::kInterceptors);
}

/// Whether anything but a profiler intercepts a call that this thread makes now with tensors of
/// these keys: one of the tensors, a mode, a level of functorch or a tracer. Without keys only the
/// latter three are looked for.
bool is_intercepted(c10::DispatchKeySet keys = {});

/// Whether a mode, a level of functorch or a tracer, other than one with these keys, intercepts all
/// calls that this thread makes now.
bool is_intercepted_except(c10::DispatchKeySet keys);

/// The keys of Python's dispatch modes and of torch.func's transforms. What they do ends with their
/// block, and the results of their ops show whether they are of use elsewhere, whereas those of a
/// tracer are part of what it records.
inline constexpr c10::DispatchKeySet kModesAndTransforms(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
     c10::DispatchKey::FuncTorchDynamicLayerBackMode,
     c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchGradWrapper,
     c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode});

/// Whether nothing but Python's dispatch modes, and observers, see a call that this thread makes
/// now with an ordinary tensor: what they hand on is computed as without them.
bool is_seen_by_modes_alone(const at::Tensor& tensor);

/// Whether `result` intercepts the ops that it is given to though `source`, of which an op made it,
/// does not intercept its own: a mode or a transform has wrapped it.
inline bool was_wrapped(const at::Tensor& result, const at::Tensor& source) {
  return (result.key_set() - source.key_set()).has_any(detail::kInterceptors);
}

/// Whether a profiler, or another observer of torch's record_function, watches the ops of this
/// thread.
bool is_observed();

/// Whether no dispatch mode, functorch level, tracer or profiler of this thread is to see a call of
/// one of fastamp's ops with ordinary CPU tensors, which would then run its CPU kernel and nothing
/// else. Callers may call that kernel instead, and hand it what they know of its arguments besides.
/// They must check the arguments and bump versions, as the op does in ADInplaceOrView, and a kernel
/// that others registered over the op's is not called.
inline bool nothing_watches_calls() { return !is_intercepted() && !is_observed(); }

/// Path: what a call with a tensor, made on this thread now, meets before the kernel of its device.
enum class CallPath : std::uint8_t {
  kDirect,       ///< Autograd and autocast at most.
  kObserved,     ///< An observer as well; the results are the same.
  kIntercepted,  ///< Something that changes what is done, or the tensor is not ordinary.
};

/// Ordinary as in core/tensor_kind.h, and here without a forward-mode tangent.
CallPath call_path(const at::Tensor& tensor);

/// Whether nothing but observers and Python's dispatch modes see a call with a tensor that has this
/// call_path() now: what it computes is the same without them.
inline bool runs_unchanged(const at::Tensor& tensor, CallPath path) {
  return path != CallPath::kIntercepted || is_seen_by_modes_alone(tensor);
}

/// Whether an op on this tensor may be computed without a call of it.
inline bool can_bypass_dispatcher(const at::Tensor& tensor) {
  return call_path(tensor) == CallPath::kDirect;
}

}  // namespace fastamp
