// SPDX-License-Identifier: Apache-2.0
#include "autocast/rnn_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mkldnn_rnn_layer_ops.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fastamp::autocast {
namespace {

using RnnResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr std::int64_t kLstm = 2;  // Of oneDNN's modes, in torch's numbering.

/// Whether oneDNN has refused the primitive in bfloat16, in float16. It always will.
std::array<std::atomic<bool>, 2> g_is_missing{};

std::atomic<bool>* is_missing(c10::ScalarType dtype) {
  if (dtype != c10::kBFloat16 && dtype != c10::kHalf) {
    return nullptr;
  }
  return &g_is_missing[dtype == c10::kBFloat16 ? 0 : 1];
}

bool says_no_primitive(const std::exception& error) {
  return std::string_view(error.what()).find("primitive descriptor") != std::string_view::npos;
}

/// As torch computes an LSTM without oneDNN, but that all of it is in the dtype of the arguments.
RnnResult run_cells(const at::Tensor& input, const at::Tensor& weight_ih,
                    const at::Tensor& weight_hh, const std::optional<at::Tensor>& bias_ih,
                    const std::optional<at::Tensor>& bias_hh, const at::Tensor& hx,
                    const at::Tensor& cx, bool reverse) {
  const auto steps = input.size(0);
  const auto from_input = at::linear(input, weight_ih, bias_ih).unbind(0);
  at::Tensor h = hx;
  at::Tensor c = cx;
  std::vector<at::Tensor> outputs(static_cast<std::size_t>(steps));
  for (std::int64_t i = 0; i < steps; ++i) {
    const auto step = static_cast<std::size_t>(reverse ? steps - 1 - i : i);
    const auto gates = (from_input[step] + at::linear(h, weight_hh, bias_hh)).chunk(4, 1);
    c = at::sigmoid(gates[1]) * c + at::sigmoid(gates[0]) * at::tanh(gates[2]);
    h = at::sigmoid(gates[3]) * at::tanh(c);
    outputs[step] = h;
  }
  return {at::stack(outputs, 0), std::move(h), std::move(c), at::empty({0}, input.options())};
}

}  // namespace

RnnResult run_rnn_layer(const at::Tensor& input, const at::Tensor& weight_ih,
                        const at::Tensor& weight_hh, const at::Tensor& bias_ih,
                        const at::Tensor& bias_hh, const at::Tensor& hx, const at::Tensor& cx,
                        bool reverse, at::IntArrayRef batch_sizes, int64_t mode,
                        int64_t hidden_size, int64_t num_layers, bool has_biases,
                        bool bidirectional, bool batch_first, bool train) {
  auto* const missing = mode == kLstm ? is_missing(input.scalar_type()) : nullptr;
  if (missing == nullptr || !missing->load(std::memory_order_relaxed)) {
    try {
      return at::_ops::mkldnn_rnn_layer::call(input, weight_ih, weight_hh, bias_ih, bias_hh, hx, cx,
                                              reverse, batch_sizes, mode, hidden_size, num_layers,
                                              has_biases, bidirectional, batch_first, train);
    } catch (const std::exception& error) {
      if (missing == nullptr || !says_no_primitive(error)) {
        throw;
      }
      missing->store(true, std::memory_order_relaxed);
    }
  }
  const auto bias = [&](const at::Tensor& given) {  // Without biases it has another shape.
    return has_biases ? std::optional(given) : std::nullopt;
  };
  return run_cells(input, weight_ih, weight_hh, bias(bias_ih), bias(bias_hh), hx, cx, reverse);
}

}  // namespace fastamp::autocast
