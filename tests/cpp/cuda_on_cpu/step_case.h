// SPDX-License-Identifier: Apache-2.0
#pragma once

// One fused step, emulated and on the CPU, over lists that mix all that a step can meet.

#include "cuda_on_cpu/tensors.h"
#include "kernels/fused_steps.h"

#include <deque>
#include <optional>
#include <vector>

namespace fastamp::test {

/// What varies between steps.
struct StepCase {
  std::size_t groups = 1;
  bool amsgrad = false;
  bool bf16_moments = false;
  bool skips = false;
  bool writes = false;
  bool clips = false;
  bool scales = false;
  std::size_t skew = 0;     ///< 0: every array on a 64-byte boundary.
  bool noisy = false;       ///< Some bf16 moments are rounded stochastically.
  bool remainders = false;  ///< Half of the masters are remainders.
  bool turned = false;      ///< Memory is in another order than the elements of most parameters.
  bool codes = false;       ///< Moments of two thirds, but for groups with amsgrad, have 8 bits.

  /// All combinations of the flags, thinned out; few if brief().
  static std::vector<StepCase> all();
};

/// The lists of a step. 16-bit parameters with masters, float32 ones with and without weight
/// copies, 16-bit and fp8 ones, gradients of all dtypes. `entries` are as src/ops makes them, and
/// refer to the lists.
struct StepLists {
  std::vector<at::Tensor> params, grads, first, second, greatest, steps, masters, copies, scales;
  std::vector<std::int64_t> group_sizes, copy_of;
  /// What entries() refers to of a case that is turned.
  mutable std::deque<at::Tensor> views{};

  StepLists copy() const;
  bool same_as(const StepLists& other) const;
  /// Puts inf or -inf into each parameter, of every second one at its end.
  void spoil() const;
  /// Of each parameter: large numbers of parameters and elements among them.
  std::vector<std::int64_t> noise_origins(const StepCase& c) const;
  std::vector<kernels::StepEntry> entries(bool adam, const StepCase& c) const;

 private:
  void turn(kernels::StepEntry& entry) const;
};

/// An fp8 copy of a weight, of some scale, behind a header that says so.
at::Tensor float8_copy(Values& values, std::int64_t numel);
/// Header and elements of an fp8 copy.
at::Tensor with_header(const at::Tensor& copy);
/// Copies of weight copies, headers included.
std::vector<at::Tensor> copies_with_headers(const std::vector<at::Tensor>& copies);

/// How many elements of the n-th parameter share a scale; 0 if its moments have no codes.
std::int64_t group_of_codes(const StepCase& c, std::size_t group, std::size_t n);

/// Whether a group's first moment is in use; SGD's third groups have no momentum.
bool has_momentum(bool adam, std::size_t group);

StepLists make_step_lists(const StepCase& c, bool adam);

/// AmpStep of a case: scale, coefficient, flag, clip value.
struct AmpStepArgs {
  std::optional<at::Tensor> inv_scale, clip_coef, found_inf;
  std::optional<double> clip_value;
  explicit AmpStepArgs(const StepCase& c);
};

}  // namespace fastamp::test
