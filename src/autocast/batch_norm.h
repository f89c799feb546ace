// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

// An op whose casts the generated kernel cannot make.
namespace fastamp::autocast {

/// Batch norm writes its running statistics, which its schema does not say: casts of them would be
/// written in their place. And it takes 16-bit inputs with parameters and statistics of their dtype
/// or of float32, and no other mix.
///
/// So a policy decides the dtype of the input. Parameters and statistics stay as they are if all of
/// them have it, else they are float32; casts of statistics are copied back after training.
///
/// Policies: lower, fp32, promote, pass, banned.
struct BatchNormKernel {
  static constexpr OpCapabilities kCapabilities{
      .lower = true, .fp32 = true, .set_opt_dtype = false, .append_dtype = false};

  static void implement(torch::Library& library, const char* qualified_name, PolicyDevice device);

  template <PolicyDevice kDevice>
  static at::Tensor call(c10::DispatchKeySet keys, const at::Tensor& input,
                         const std::optional<at::Tensor>& weight,
                         const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& running_mean,
                         const std::optional<at::Tensor>& running_var, bool training,
                         double momentum, double eps, bool cudnn_enabled);
};

}  // namespace fastamp::autocast
