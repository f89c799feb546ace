// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Optimizer steps over whole lists of parameters: unscale, clip, skip on overflow, weight decay,
/// moments and parameters in one pass over memory. Dispatcher ops of the same names.

#include <fastamp/macros.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fastamp::ops {

/// Arguments of fused_sgd_, in the order of its schema. Borrowed for the call.
struct FusedSgdArgs {
  /// Strided, not overlapping, on one device; float32, float16 or bfloat16, mixed. At least one. In
  /// place. No two tensors of a call may share memory.
  at::TensorList params;
  /// Tensors of the shapes of params; float32, float16 or bfloat16, each as it comes.
  at::TensorList grads;
  /// float32 or bfloat16, of the shape of its parameter, one for each parameter of a group whose
  /// momentum is not 0, in their order. In place.
  at::TensorList momentum_buffers;
  /// float32, one element each, on the device of params, one for each momentum buffer: how many
  /// steps it has seen. At 0 the buffer's contents are not read. In place: + 1, unless the step is
  /// skipped; from 2^24 on, of which float32 has no successor, the next float32.
  at::TensorList momentum_steps;
  /// float32, of the shape of its parameter, one for each 16-bit parameter, in order; or int16:
  /// what the parameter lacks of its master (optim/stored_state.h). Then nothing shows whether the
  /// parameter was written: w is parameter and remainder, and that of a parameter that was, is at
  /// most half a unit of it off. In place.
  at::TensorList masters;
  /// Number of parameters in each group; their sum is the length of params.
  at::IntArrayRef group_sizes;
  /// Values for each group, as in torch.optim.SGD.
  at::ArrayRef<double> lr;
  at::ArrayRef<double> momentum;
  at::ArrayRef<double> dampening;
  at::ArrayRef<double> weight_decay;
  const c10::List<bool>& nesterov;
  const c10::List<bool>& maximize;
  /// Empty, or for each group a float32 or float64 tensor of one element, on the device of params
  /// or on the CPU, that replaces lr[g]. Read on the device.
  at::TensorList lr_tensors;
  /// float16 or bfloat16 copies of float32 parameters, of their shapes, which the step writes: the
  /// parameter rounded to nearest even. Never read, so whatever they hold changes no parameter. A
  /// skipped step leaves them as they are. In place. Or float8_e4m3fn, laid out as the parameter,
  /// 16 or a multiple of 16 bytes into its storage. The 16 bytes before it hold the inverse of its
  /// scale, a power of two (float32), which is read; then two int32 that the step writes: one more
  /// than the bits of the greatest finite magnitude of the new parameter, or what is there if that
  /// is more, and 1 if inf or NaN is among it. Values beyond 448 / scale become that. CUDA devices
  /// below compute capability 8.9 write only these numbers, the last of them as 1.
  at::TensorList weight_copies;
  /// Indices for each weight copy: the one in params of its parameter; ascending.
  at::IntArrayRef copy_of;
  /// float32, one element, on the device of params; None stands for 1, 1 and 0.
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& found_inf;
  /// Greatest magnitude of an element, at least 0, or none; as torch.nn.utils.clip_grad_value_
  /// has it. A NaN stays.
  std::optional<double> clip_value;
  /// True: leaves the gradients unscaled and clipped. False: only reads them.
  bool write_grads = true;
  /// Empty: bfloat16 buffers are rounded to nearest even. Else for each parameter -1 for that, or p
  /// * 2^32 + i with p and i in [0, 2^31) and [0, 2^32): where momentum is above 0.9375, and to
  /// nearest would keep a buffer where it is, it is rounded stochastically, by noise that is a pure
  /// function of p (the parameter's number), of i + the element's index (row by row, modulo 2^32),
  /// and of momentum_steps. A step on the CPU, on CUDA, with other threads or another memory format
  /// has the same bits.
  at::IntArrayRef noise_origins{};
};

/// One step of SGD for all parameter groups at once, with the arithmetic of torch.optim.SGD.
///
/// Parameters are listed group after group; group g owns the next group_sizes[g] of them, and the
/// lists of hyperparameters have an element for each group. For each element, in fp32, with fused
/// multiply-adds where torch's CPU kernels have them:
///   g = clamp(grad * inv_scale * clip_coef, -clip_value, clip_value), negated if maximize
///   g += weight_decay * w, unless that is 0
///   with momentum: b = momentum * b + (1 - dampening) * g, or b = g at the first step;
///                  g = nesterov ? g + momentum * b : b
///   w -= lr * g
/// w is the parameter, or for a 16-bit parameter its fp32 master weight, from which the parameter
/// is then rounded to nearest even; where the parameter is not its master rounded, it has been
/// written since, and w is the parameter. The step is skipped where found_inf is not 0 (NaN and 2
/// count): parameters, masters, buffers and step counters then keep their bits, and the next step
/// counts as the first if this one did. Gradients are left unscaled and clipped, skipped or not, as
/// torch.amp leaves them; with write_grads false they are only read. They are not written either if
/// both factors are 1 and there is no clip_value.
///
/// @throws c10::TypeError   a dtype is not among those above.
/// @throws c10::ValueError  lists, shapes or devices do not match, or clip_value is negative or
///                NaN. Nothing was changed.
/// @throws c10::NotImplementedError  the tensors are on a device other than CPU and CUDA.
/// @note CUDA: asynchronous on the current stream, no host sync; one launch per 32 groups.
///       Tensors that are not dense, or whose strides differ from their parameter's, are copied.
///       Bumps the versions of all it writes; records no autograd node. CPU: uses
///       at::get_num_threads() threads.
FASTAMP_API void fused_sgd_(const FusedSgdArgs& args);

/// Arguments of fused_adamw_, in the order of its schema. Borrowed for the call. Members
/// without a comment are those of FusedSgdArgs.
struct FusedAdamwArgs {
  at::TensorList params;
  at::TensorList grads;
  /// m and v: float32 or bfloat16 (computed in fp32, rounded when stored), of the shape of params,
  /// one each. In place. Or both uint8, codes: at most 1.0625 times m, and at least 0.94 times
  /// sqrt(v), so that the same state takes a step of at most 1.13 times the length; with a beta1
  /// above 0.9375 1.2 times. Then the parameter has a noise_origin, moment_scales, and no amsgrad.
  at::TensorList exp_avgs;
  at::TensorList exp_avg_sqs;
  /// v': the same, one for each parameter of a group with amsgrad, in order. The moments of one
  /// parameter have one dtype.
  at::TensorList max_exp_avg_sqs;
  /// float32, one element each, on the device of params, one for each parameter: steps the moments
  /// have seen. In place, as momentum_steps in fused_sgd_.
  at::TensorList state_steps;
  at::TensorList masters;
  at::IntArrayRef group_sizes;
  /// Values for each group, as in torch.optim.Adam.
  at::ArrayRef<double> lr;
  at::ArrayRef<double> beta1;
  at::ArrayRef<double> beta2;
  at::ArrayRef<double> eps;
  at::ArrayRef<double> weight_decay;
  /// Flags for each group: AdamW's weight decay, else Adam's.
  const c10::List<bool>& decoupled;
  const c10::List<bool>& amsgrad;
  const c10::List<bool>& maximize;
  at::TensorList lr_tensors;
  at::TensorList weight_copies;
  at::IntArrayRef copy_of;
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& found_inf;
  std::optional<double> clip_value;
  bool write_grads = true;
  /// Origins as in fused_sgd_: of bfloat16 moments v and v' are rounded stochastically, both by the
  /// same noise, and m if beta1 is above 0.9375; else m is rounded to nearest even. So are v and m
  /// of uint8 moments.
  at::IntArrayRef noise_origins{};
  /// uint8, one for each parameter whose moments are uint8, in their order, of shape
  /// [params[i].size(0), groups of a row, 2]: for each 32, 64 or 128 neighbouring elements of a row
  /// of the first dimension the scales of m and v. Codes and scales of 0 are moments of 0. In
  /// place.
  at::TensorList moment_scales{};
};

/// One step of Adam or AdamW for all parameter groups at once, with the arithmetic of
/// torch.optim.Adam and AdamW (foreach, not capturable).
///
/// Lists, what an AmpStep holds (inv_scale, clip_coef, found_inf, clip_value, write_grads),
/// masters, lr_tensors, weight copies, errors and notes are those of fused_sgd_. For each element,
/// in fp32, constants in fp64 rounded once, t = steps + 1:
///   g = clamp(grad * inv_scale * clip_coef, -clip_value, clip_value), negated if maximize
///   decoupled (AdamW): w *= 1 - lr * weight_decay;  else (Adam): g += weight_decay * w
///   m = lerp(m, g, 1 - beta1);  v = beta2 * v + (1 - beta2) * g * g;  amsgrad: v' = max(v', v)
///   w -= lr / (1 - beta1^t) * m / (sqrt(v or v') / sqrt(1 - beta2^t) + eps)
FASTAMP_API void fused_adamw_(const FusedAdamwArgs& args);

/// Arguments of muon_momentum_, in the order of its schema. Borrowed for the call. Members
/// without a comment are those of FusedSgdArgs.
struct MuonMomentumArgs {
  /// Tensors of the shapes of updates; float32, float16 or bfloat16, each as it comes.
  at::TensorList grads;
  /// b: float32 or bfloat16, of the shapes of updates. In place.
  at::TensorList momentum_buffers;
  /// u: float32, float16 or bfloat16, rounded to nearest even; dense, on one device. At least one.
  /// Written, never read.
  at::TensorList updates;
  at::IntArrayRef group_sizes;
  /// Values for each group, as in torch.optim.Muon.
  at::ArrayRef<double> momentum;
  const c10::List<bool>& nesterov;
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& found_inf;
  std::optional<double> clip_value;
  bool write_grads = true;
  /// Values for each of updates, as in fused_sgd_.
  at::IntArrayRef noise_origins{};
  /// Tensors as in fused_sgd_, one for each of updates whose noise_origin is at least 0, in their
  /// order. What a buffer holds counts at 0 steps, too.
  at::TensorList momentum_steps{};
};

/// The first half of a step of Muon, for all matrices at once, with the arithmetic of
/// torch.optim.Muon: gradients unscaled and clipped, momentum, and the matrices that the
/// Newton-Schulz iteration makes orthogonal.
///
/// Matrices are listed group after group, as in fused_sgd_. For each element, in fp32, lerp with a
/// fused multiply-add from the nearer end:
///   g = clamp(grad * inv_scale * clip_coef, -clip_value, clip_value)
///   b = lerp(b, g, 1 - momentum);  u = nesterov ? lerp(g, b, momentum) : b
/// Where found_inf is not 0 the buffers keep their bits, and u is 0. What an AmpStep holds, errors
/// and notes are those of fused_sgd_.
FASTAMP_API void muon_momentum_(const MuonMomentumArgs& args);

/// Arguments of muon_apply_, in the order of its schema. Borrowed for the call. Members
/// without a comment are those of FusedSgdArgs.
struct MuonApplyArgs {
  at::TensorList params;
  /// u: float32, float16 or bfloat16, of the shapes of params. Only read.
  at::TensorList updates;
  at::TensorList masters;
  at::IntArrayRef group_sizes;
  /// Values for each group, as in torch.optim.Muon.
  at::ArrayRef<double> lr;
  /// Factors for each group: what its shape multiplies the rate with.
  at::ArrayRef<double> ratio;
  at::ArrayRef<double> weight_decay;
  at::TensorList lr_tensors;
  at::TensorList weight_copies;
  at::IntArrayRef copy_of;
  const std::optional<at::Tensor>& found_inf;
};

/// The second half of a step of Muon: w = w * (1 - lr * weight_decay) - lr * ratio * u, in fp32,
/// the products with u in a fused multiply-add. Nothing is written where found_inf is not 0.
FASTAMP_API void muon_apply_(const MuonApplyArgs& args);

}  // namespace fastamp::ops
