// SPDX-License-Identifier: Apache-2.0
//
// Operators of cuDNN, and of torch's CUDA part, by torch's other operators.
//
// Stands for: convolution, batch normalisation, softmax that makes fp32 of 16 bits, what cuBLAS
// takes of products in fp8. Does not stand for: cuDNN's choice of algorithms, its numerics, its
// other operators; the fused kernels for attention, which are switched off: attention is products
// and softmax.
#include "simulated_cuda/redirect/libraries.h"

#include "simulated_cuda/redirect/operators.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace simulated_cuda {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const Tensor& weight,
                                                      const MaybeTensor& bias,
                                                      const MaybeTensor& mean,
                                                      const MaybeTensor& variance, bool training,
                                                      double momentum, double epsilon) {
  auto [output, saved_mean, saved_scale] =
      at::native_batch_norm(input, weight, bias, mean, variance, training, momentum, epsilon);
  return {output, saved_mean, saved_scale, at::empty({0}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& input, const Tensor& gradient, const Tensor& weight, const MaybeTensor& mean,
    const MaybeTensor& variance, const MaybeTensor& saved_mean, const MaybeTensor& saved_scale,
    double epsilon, const Tensor& /*reserve*/) {
  return at::native_batch_norm_backward(gradient, input, weight, mean, variance, saved_mean,
                                        saved_scale, true, epsilon, {true, true, true});
}

Tensor convolution(const Tensor& input, const Tensor& weight, c10::SymIntArrayRef padding,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef dilation, c10::SymInt groups,
                   bool /*benchmark*/, bool /*deterministic*/, bool /*allow_tf32*/) {
  const std::vector<c10::SymInt> no_padding(stride.size(), 0);
  return at::convolution_symint(input, weight, {}, stride, padding, dilation, false, no_padding,
                                std::move(groups));
}

Tensor transposed_convolution(const Tensor& input, const Tensor& weight,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                              c10::SymIntArrayRef stride, c10::SymIntArrayRef dilation,
                              c10::SymInt groups, bool /*benchmark*/, bool /*deterministic*/,
                              bool /*allow_tf32*/) {
  return at::convolution_symint(input, weight, {}, stride, padding, dilation, true, output_padding,
                                std::move(groups));
}

Tensor softmax_of(const char* name, const Tensor& self, int64_t dim, bool to_float) {
  return run_by_name(name, {to_float ? self.to(at::kFloat) : self, dim, false});
}
Tensor softmax(const Tensor& self, int64_t dim, bool to_float) {
  return softmax_of("aten::_softmax", self, dim, to_float);
}
Tensor log_softmax(const Tensor& self, int64_t dim, bool to_float) {
  return softmax_of("aten::_log_softmax", self, dim, to_float);
}

Tensor softmax_backward_of(const char* name, const Tensor& gradient, const Tensor& output,
                           int64_t dim, at::ScalarType dtype) {
  return run_by_name(name, {gradient, output, dim, gradient.scalar_type()}).to(dtype);
}
Tensor softmax_backward(const Tensor& gradient, const Tensor& output, int64_t dim,
                        at::ScalarType dtype) {
  return softmax_backward_of("aten::_softmax_backward_data", gradient, output, dim, dtype);
}
Tensor log_softmax_backward(const Tensor& gradient, const Tensor& output, int64_t dim,
                            at::ScalarType dtype) {
  return softmax_backward_of("aten::_log_softmax_backward_data", gradient, output, dim, dtype);
}

bool has_rows(const Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
}

bool is_aligned(const Tensor& matrix) {
  constexpr int64_t kBytes = 16;
  return reinterpret_cast<std::intptr_t>(matrix.const_data_ptr()) % kBytes == 0 &&
         matrix.size(0) % kBytes == 0 && matrix.size(1) % kBytes == 0;
}

/// Products in fp8: those of the CPU take more than cuBLAS does.
void run_scaled_product(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  constexpr int kFirstCapability = 89;
  constexpr int kAnyLayout = 100;
  const auto given = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const Tensor a = given[0].toTensor();
  const Tensor b = given[1].toTensor();
  const auto bias = given[4].toOptional<Tensor>();
  const auto dtype = given[6].toOptional<at::ScalarType>().value_or(a.scalar_type());
  const auto* const device = at::cuda::getDeviceProperties(a.device().index());
  const int capability = 10 * device->major + device->minor;
  TORCH_CHECK(capability >= kFirstCapability, "simulated CUDA: no fp8 on ", device->major, ".",
              device->minor);
  TORCH_CHECK(at::isFloat8Type(a.scalar_type()) && at::isFloat8Type(b.scalar_type()) &&
                  (a.scalar_type() == at::kFloat8_e4m3fn || b.scalar_type() == at::kFloat8_e4m3fn),
              "simulated CUDA: cuBLAS multiplies no ", a.scalar_type(), " by ", b.scalar_type());
  TORCH_CHECK(capability >= kAnyLayout || (has_rows(a) && has_rows(b.t())),
              "simulated CUDA: cuBLAS multiplies rows in fp8 by columns, got strides ", a.strides(),
              " and ", b.strides());
  TORCH_CHECK(a.size(1) % 16 == 0 && is_aligned(b.t()),
              "simulated CUDA: cuBLAS wants multiples of 16 in fp8, got ", a.sizes(), " and ",
              b.sizes());
  TORCH_CHECK(!bias || !bias->defined() ||
                  (dtype != at::kFloat &&
                   bias->scalar_type() == (dtype == at::kHalf ? at::kHalf : at::kBFloat16)),
              "simulated CUDA: cuBLAS adds no bias in that dtype to a product in ", dtype);
  run_operator(op, keys, stack);
}

}  // namespace

void register_libraries(Register add) {
  using c10::KernelFunction;
  add("aten::_convolution", KernelFunction::makeFromBoxedFunction<&run_convolution>());
  add("aten::convolution_backward", KernelFunction::makeFromBoxedFunction<&run_convolution>());
  add("aten::_scaled_mm", KernelFunction::makeFromBoxedFunction<&run_scaled_product>());
  add("aten::copy_", KernelFunction::makeFromBoxedFunction<&run_copy>());
  add("aten::cudnn_batch_norm", KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm));
  add("aten::cudnn_batch_norm_backward",
      KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm_backward));
  add("aten::cudnn_convolution", KernelFunction::makeFromUnboxedRuntimeFunction(&convolution));
  add("aten::cudnn_convolution_transpose",
      KernelFunction::makeFromUnboxedRuntimeFunction(&transposed_convolution));
  add("aten::_softmax", KernelFunction::makeFromUnboxedRuntimeFunction(&softmax));
  add("aten::_log_softmax", KernelFunction::makeFromUnboxedRuntimeFunction(&log_softmax));
  add("aten::_softmax_backward_data",
      KernelFunction::makeFromUnboxedRuntimeFunction(&softmax_backward));
  add("aten::_log_softmax_backward_data",
      KernelFunction::makeFromUnboxedRuntimeFunction(&log_softmax_backward));
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}

}  // namespace simulated_cuda
