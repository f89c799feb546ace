// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace fastamp::optim {

/// Rounding of moments that are stored in bfloat16: second ones, and first ones with a first
/// beta above 0.9375. Others move far enough in each step to be rounded to nearest.
enum class StateRounding : std::uint8_t {
  /// Up or down, with probabilities that make the mean exact. Which of them is a pure function of
  /// the element, the step and the parameter's position among those of the optimizer: the same bits
  /// on CPU and CUDA, with any threads, on all replicas, and after a resume.
  kStochastic,
  /// Rounded to nearest even, as torch's fused Adam (2.12 and later) does it. With a beta above
  /// 0.99 a moment then follows growing gradients but hardly falling ones.
  kNearest,
};

/// Storage of the fp32 master of a 16-bit parameter.
enum class MasterStorage : std::uint8_t {
  kFloat,  ///< As float32, 4 bytes.
  /// Remainder that the parameter lacks of it, an int16: 2 bytes. For a bfloat16 parameter exact
  /// but for one of 131 072 masters, which comes back one unit of float32 nearer to zero; for a
  /// float16 parameter exact from 2^-14 on, below that within 2^-40.
  kRemainder,
};

/// The float32 master of a parameter and its remainder.
/// @param param  float16 or bfloat16. One that is inf or NaN is its own master.
/// @param remainder   int16, of the shape of param, on its device.
/// @throws c10::TypeError, c10::ValueError for other dtypes, shapes or devices.
FASTAMP_API at::Tensor master_from_remainder(const at::Tensor& param, const at::Tensor& remainder);

/// The remainder of a master; 0 where param is not the master rounded to nearest even, which it
/// then was no longer: it has been written since, and is its own master.
/// @param param   float16 or bfloat16, what master rounds to.
/// @param master  float32, of the shape of param, on its device.
/// @throws  As master_from_remainder.
FASTAMP_API at::Tensor remainder_from_master(const at::Tensor& param, const at::Tensor& master);

/// The float32 value that the next step starts from: the master, where the parameter is still what
/// it rounds to, and the parameter where something else was written into it since.
/// @param param   float16 or bfloat16, or of any dtype that float32 is cast to.
/// @param master  float32, of the shape of param, on its device: `state.master()`.
FASTAMP_API at::Tensor current_master(const at::Tensor& param, const at::Tensor& master);

/// The moments of a parameter of Adam in 8 bits, with `state_dtype(torch::kByte)`: uint8 codes of
/// the parameter's shape, contiguous, and uint8 scales of shape [rows, groups of a row, 2], for
/// each 32, 64 or 128 neighbours in a row of the first dimension those of the two moments.
struct EncodedMoments {
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor scales;
};

/// Encodes moments as a step stores them, but that second ones are rounded to nearest, too.
/// @param exp_avg,exp_avg_sq  Of one shape; any real dtype.
/// @param group  Elements that share a scale: 32, 64 or 128, a divisor of a row of dimension 0.
/// @throws c10::ValueError if shapes or group do not fit.
/// @note Works on the CPU: moments on another device are copied there and back.
FASTAMP_API EncodedMoments encode_moments(const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                                          std::int64_t group);

/// The moments that codes stand for, float32; NaN for a group that had an inf or a NaN.
/// @returns exp_avg and exp_avg_sq, on the device of the codes.
/// @throws c10::TypeError, c10::ValueError for other dtypes or shapes.
/// @note As encode_moments.
FASTAMP_API std::pair<at::Tensor, at::Tensor> decode_moments(const EncodedMoments& codes);

}  // namespace fastamp::optim
