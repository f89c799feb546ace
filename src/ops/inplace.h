#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace fastamp::ops {

/// Bumps the version of a tensor that an op has written. Inference tensors have none; no backward
/// can have saved them.
inline void bump_version(const at::Tensor& t) {
  if (t.defined() && !t.is_inference()) {
    t.unsafeGetTensorImpl()->bump_version();
  }
}

inline void bump_versions(at::TensorList list) {
  for (const auto& t : list) {
    bump_version(t);
  }
}

}  // namespace fastamp::ops
