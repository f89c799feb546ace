// SPDX-License-Identifier: Apache-2.0
//
// Operators of cuDNN, and of torch's CUDA part, by torch's other operators.
//
// Stands for: convolution, batch normalisation, softmax that makes fp32 of 16 bits. Does not stand
// for: cuDNN's choice of algorithms, its numerics, its other operators; the fused kernels for
// attention, which are switched off: attention is products and softmax.
#include "simulated_cuda/redirect/libraries.h"

#include "simulated_cuda/redirect/operators.h"

#include <ATen/ATen.h>

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

}  // namespace

void register_libraries(Register add) {
  using c10::KernelFunction;
  add("aten::_convolution", KernelFunction::makeFromBoxedFunction<&run_convolution>());
  add("aten::convolution_backward", KernelFunction::makeFromBoxedFunction<&run_convolution>());
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
