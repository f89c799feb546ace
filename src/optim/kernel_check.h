// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

namespace fastamp::optim {

/// Whether the fused steps have a kernel for a parameter; LibTorch's own step takes the others.
bool has_kernel(const at::Tensor& param);

/// Checks one parameter after another: one like the last costs two comparisons.
class KernelCheck {
 public:
  bool operator()(const at::Tensor& param) {
    const auto* impl = param.unsafeGetTensorImpl();
    return (impl->key_set() == keys_ && impl->dtype() == dtype_) || look(param);
  }
  /// Whether the last parameter that was looked at and has a kernel is a 16-bit one.
  bool is_16_bit() const { return is_16_bit_; }

 private:
  bool look(const at::Tensor& param);

  c10::DispatchKeySet keys_;  ///< These hold the device's type and the layout.
  caffe2::TypeMeta dtype_;
  bool is_16_bit_ = false;
};

}  // namespace fastamp::optim
