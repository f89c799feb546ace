#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include <optional>

namespace fastamp::ops {

/// Looks up an op; the handle is kept by the caller, since a lookup costs a lock and a hash.
template <typename Fn>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Fn>();
}

/// Bumps the version of a tensor that an op has written. Inference tensors have none; no backward
/// can have saved them.
inline void bump_version(const at::Tensor& t) {
  if (t.defined() && !t.is_inference()) {
    t.unsafeGetTensorImpl()->bump_version();
  }
}

inline void bump_version(const std::optional<at::Tensor>& t) {
  if (t) {
    bump_version(*t);
  }
}

inline void bump_versions(at::TensorList list) {
  for (const auto& t : list) {
    bump_version(t);
  }
}

/// The ADInplaceOrView kernel of an op: runs it below autograd's keys, then calls kBump with its
/// arguments as one struct, so that a call that throws bumps no version.
template <typename Args, auto kOp, auto kBump>
struct Inplace;
template <typename Args, typename... T, void (*kOp)(T...), auto kBump>
struct Inplace<Args, kOp, kBump> {
  static inline const char* name = nullptr;
  static void call(c10::DispatchKeySet keys, T... args) {
    static const auto op = find_op<void(T...)>(name);
    op.redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
    kBump(Args{args...});
  }
  static auto named(const char* op_name) {
    name = op_name;
    return &call;
  }
};

}  // namespace fastamp::ops
