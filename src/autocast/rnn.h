// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <cstdint>
#include <optional>
#include <tuple>

// Recurrent layers: ops whose casts, or whose kernels in 16 bits, need code of their own.
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

/// One layer of an LSTM on the CPU in one direction, by oneDNN: `at::mkldnn_rnn_layer`, whose
/// arguments these are.
///
/// oneDNN has no such primitive for 16 bits on CPUs without the instructions for it, and torch 2.11
/// then fails. There the layer is computed by torch's own ops in the dtype of the arguments.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> run_rnn_layer(
    const at::Tensor& input, const at::Tensor& weight_ih, const at::Tensor& weight_hh,
    const at::Tensor& bias_ih, const at::Tensor& bias_hh, const at::Tensor& hx,
    const at::Tensor& cx, bool reverse, at::IntArrayRef batch_sizes, int64_t mode,
    int64_t hidden_size, int64_t num_layers, bool has_biases, bool bidirectional, bool batch_first,
    bool train);

}  // namespace fastamp::autocast
