// SPDX-License-Identifier: Apache-2.0
#include "autocast/data_cast.h"

#include "kernels/cpu/dense_cast.h"
#include "kernels/cuda_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/to_ops.h>

#include <utility>

namespace fastamp::autocast {
namespace {

/// Number of elements from which on torch's kernel, which uses several threads, is faster.
constexpr std::int64_t kDirectNumel = 32768;

bool is_small_and_dense(const at::Tensor& tensor, c10::ScalarType to) {
  return tensor.is_cpu() && tensor.numel() <= kDirectNumel &&
         tensor.is_non_overlapping_and_dense() && kernels::cpu::can_cast(tensor.scalar_type(), to);
}

}  // namespace

at::Tensor cast_data(const at::Tensor& tensor, c10::ScalarType to) {
  if (is_small_and_dense(tensor, to)) {
    at::Tensor out =
        at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), to, /*pin_memory=*/false);
    kernels::cpu::cast_contiguous(tensor.const_data_ptr(), tensor.scalar_type(),
                                  out.mutable_data_ptr(), to, tensor.numel());
    return out;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::_ops::_to_copy::call(tensor, to, std::nullopt, std::nullopt, std::nullopt,
                                  /*non_blocking=*/false, std::nullopt);
}

at::Tensor cast_without_history(const at::Tensor& tensor, c10::ScalarType to, CallPath path) {
  if (path == CallPath::kDirect) {
    return cast_data(tensor, to);
  }
  const at::NoGradGuard no_grad;
  return at::_ops::to_dtype::call(tensor, to, /*non_blocking=*/false, /*copy=*/false, std::nullopt);
}

std::vector<at::Tensor> cast_data_together(const std::vector<at::Tensor>& tensors,
                                           c10::ScalarType to) {
  std::vector<at::Tensor> casts;
  casts.reserve(tensors.size());
  const auto* const cuda = tensors.front().is_cuda() ? kernels::cuda_kernels() : nullptr;
  if (cuda != nullptr) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const at::Tensor& tensor : tensors) {
      casts.push_back(at::_ops::empty_strided::call(tensor.sym_sizes(), tensor.sym_strides(), to,
                                                    c10::kStrided, tensor.device(), std::nullopt));
    }
    cuda->cast_together(tensors, casts);
    return casts;
  }
  for (const at::Tensor& tensor : tensors) {
    casts.push_back(cast_data(tensor, to));
  }
  return casts;
}

at::Tensor make_alias(c10::Storage memory, const at::Tensor& shape, c10::ScalarType dtype,
                      const c10::VariableVersion& version) {
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(memory),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, shape.device())),
      c10::scalarTypeToTypeMeta(dtype));
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(shape.sizes(), shape.strides());
  impl->set_version_counter(version);
  return alias;
}

at::Tensor make_alias(const at::Tensor& tensor) {
  return make_alias(tensor.storage(), tensor, tensor.scalar_type(),
                    tensor.unsafeGetTensorImpl()->version_counter());
}

}  // namespace fastamp::autocast
