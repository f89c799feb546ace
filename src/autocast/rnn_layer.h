// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace fastamp::autocast {

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
