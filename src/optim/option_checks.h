// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/dtypes.h"

#include <fastamp/optim/muon_rate.h>
#include <fastamp/optim/stored_state.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <tuple>

namespace fastamp::optim {

/// @throws c10::Error unless value is a number of at least 0.
inline void check_not_negative(const char* function, const char* name, double value) {
  TORCH_CHECK(value >= 0.0, function, ": expected ", name, " >= 0, got ", value);
}

inline void check_state_dtype(const char* function, c10::ScalarType dtype) {
  TORCH_CHECK(dtype == c10::kFloat || dtype == c10::kBFloat16, function,
              ": expected state_dtype to be Float or BFloat16, got ", dtype);
}

/// Adam's may also be codes of 8 bits.
inline void check_moments_dtype(const char* function, c10::ScalarType dtype) {
  TORCH_CHECK(dtype == c10::kFloat || dtype == c10::kBFloat16 || dtype == c10::kByte, function,
              ": expected state_dtype to be Float, BFloat16 or Byte, got ", dtype);
}

inline void check_autocast_dtype(const char* function, c10::ScalarType dtype) {
  TORCH_CHECK(dtype == c10::ScalarType::Undefined || is_16_bit(dtype) ||
                  dtype == c10::ScalarType::Float8_e4m3fn,
              function,
              ": expected autocast_dtype to be Half, BFloat16, Float8_e4m3fn or Undefined, got ",
              dtype);
}

/// Options that LibTorch's do not have: a value may be any, where it was cast from a number or read
/// from an archive. Adam's moments may also be codes of 8 bits.
/// @throws c10::Error unless it is one that a step knows.
template <typename Options>
void check_stored(const char* function, const Options& options) {
  if constexpr (requires { options.state_rounding(); }) {
    check_moments_dtype(function, options.state_dtype());
    const auto rounding = options.state_rounding();
    TORCH_CHECK(rounding == StateRounding::kStochastic || rounding == StateRounding::kNearest,
                function, ": expected state_rounding to be kStochastic or kNearest, got ",
                static_cast<int>(rounding));
  } else {
    check_state_dtype(function, options.state_dtype());
  }
  TORCH_CHECK(
      options.master() == MasterStorage::kFloat || options.master() == MasterStorage::kRemainder,
      function, ": expected master to be kFloat or kRemainder, got ",
      static_cast<int>(options.master()));
  check_autocast_dtype(function, options.autocast_dtype());
  if constexpr (requires { options.ns_dtype(); }) {
    const auto dtype = options.ns_dtype();
    TORCH_CHECK(dtype == c10::kFloat || is_16_bit(dtype), function,
                ": expected ns_dtype to be BFloat16, Half or Float, got ", dtype);
    TORCH_CHECK(options.adjust_lr_fn() <= MuonRate::kSpectralUnclamped, function,
                ": expected adjust_lr_fn to be a MuonRate, got ",
                static_cast<int>(options.adjust_lr_fn()));
  }
}

/// The conditions of LibTorch's Adam and AdamW, and those on our own options.
template <typename Options>
void check_adam_options(const char* function, const Options& options) {
  check_not_negative(function, "lr", options.lr());
  check_not_negative(function, "eps", options.eps());
  check_not_negative(function, "weight_decay", options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK(0.0 <= beta1 && beta1 < 1.0, function, ": expected betas[0] in [0, 1), got ", beta1);
  TORCH_CHECK(0.0 <= beta2 && beta2 < 1.0, function, ": expected betas[1] in [0, 1), got ", beta2);
  check_stored(function, options);
}

/// Whether a moment is rounded more coarsely than the change that a step makes to it.
template <typename Options>
bool has_narrow_moments(const Options& options) {
  const auto [beta1, beta2] = options.betas();
  return options.state_dtype() == c10::kBFloat16 &&
         options.state_rounding() == StateRounding::kNearest && (beta1 > 0.99 || beta2 > 0.99);
}

template <typename Options>
void warn_of_narrow_moments(const char* function, const Options& options) {
  if (has_narrow_moments(options)) {
    const auto [beta1, beta2] = options.betas();
    const bool first = beta1 > 0.99;
    TORCH_WARN(
        function, ": state_dtype kBFloat16 with state_rounding kNearest cannot follow betas[",
        first ? 0 : 1, "] = ", first ? beta1 : beta2, ": a step changes the ",
        first ? "first moment by less than half a unit of bfloat16, so that updates go on long "
                "after gradients are gone"
              : "second moment by less than half a unit of bfloat16, so that updates stay nearly "
                "five times too small after gradients fell tenfold",
        ". Use state_rounding kStochastic, or betas[", first ? 0 : 1, "] <= 0.99.");
  }
}

/// One warning for all groups of an optimizer that was just constructed.
template <typename Options>
void warn_once_of_narrow_moments(const char* function, const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    if (has_narrow_moments(options)) {
      warn_of_narrow_moments(function, options);
      return;
    }
  }
}

}  // namespace fastamp::optim
