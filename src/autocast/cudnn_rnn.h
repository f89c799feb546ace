// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"
#include "autocast/policy_device.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <tuple>

// Ops whose casts the generated kernel cannot make.
namespace fastamp::autocast {

/// cuDNN wants all weights of a recurrent layer in one buffer with its own layout, so the casts of
/// the weights go into a new such buffer. The dtype is always float16, as in torch,
/// whatever the region's.
///
/// Policies: lower (as above), pass, banned.
struct CudnnRnnKernel {
  using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

  static constexpr OpCapabilities kCapabilities{
      .lower = true, .fp32 = false, .set_opt_dtype = false, .append_dtype = false};

  static void implement(torch::Library& library, const char* qualified_name, PolicyDevice device);

  template <PolicyDevice kDevice>
  static Result call(const at::Tensor& input, at::TensorList weight, int64_t weight_stride0,
                     const std::optional<at::Tensor>& weight_buf, const at::Tensor& hx,
                     const std::optional<at::Tensor>& cx, int64_t mode, c10::SymInt hidden_size,
                     c10::SymInt proj_size, int64_t num_layers, bool batch_first, double dropout,
                     bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes,
                     const std::optional<at::Tensor>& dropout_state);
};

}  // namespace fastamp::autocast
