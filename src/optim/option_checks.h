// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/dtypes.h"

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

/// The conditions of LibTorch's Adam and AdamW, and those on our own options.
template <typename Options>
void check_adam_options(const char* function, const Options& options) {
  check_not_negative(function, "lr", options.lr());
  check_not_negative(function, "eps", options.eps());
  check_not_negative(function, "weight_decay", options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK(0.0 <= beta1 && beta1 < 1.0, function, ": expected betas[0] in [0, 1), got ", beta1);
  TORCH_CHECK(0.0 <= beta2 && beta2 < 1.0, function, ": expected betas[1] in [0, 1), got ", beta2);
  check_moments_dtype(function, options.state_dtype());
  check_autocast_dtype(function, options.autocast_dtype());
}

/// Whether the second moment is rounded more coarsely than the change that a step makes to it.
template <typename Options>
bool has_narrow_moments(const Options& options) {
  return options.state_dtype() == c10::kBFloat16 &&
         options.state_rounding() == StateRounding::kNearest && std::get<1>(options.betas()) > 0.99;
}

template <typename Options>
void warn_of_narrow_moments(const char* function, const Options& options) {
  if (has_narrow_moments(options)) {
    TORCH_WARN(function,
               ": state_dtype kBFloat16 with state_rounding kNearest cannot follow betas[1] = ",
               std::get<1>(options.betas()),
               ": a step changes the second moment by less than half a unit of bfloat16, so that "
               "updates stay nearly five times too small after gradients fell tenfold. Use "
               "state_rounding kStochastic, or betas[1] <= 0.99.");
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
