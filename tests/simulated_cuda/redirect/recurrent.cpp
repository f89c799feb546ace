// SPDX-License-Identifier: Apache-2.0
//
// Recurrent layers: cuDNN's RNNs, and the fused LSTM and GRU cells.
//
// Stands for: results and gradients of torch's own layers. The backward pass computes the forward
// pass again. What surrounds that is torch's code for CUDA, which puts weights where
// runtime/cudnn.cpp says. Does not stand for: cuDNN's numerics, projections.
#include "simulated_cuda/redirect/libraries.h"
#include "simulated_cuda/redirect/operators.h"
#include "simulated_cuda/redirect/random.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

namespace simulated_cuda {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

/// cuDNN's numbers of its modes.
enum Mode : int64_t { kReluRnn = 0, kTanhRnn = 1, kLstm = 2, kGru = 3 };

struct Layers {
  int64_t mode;
  int64_t count;
  bool batch_first;
  double dropout;
  bool train;
  bool bidirectional;
  c10::SymIntArrayRef batch_sizes;  ///< Of a packed sequence; else empty.
  int64_t weights_per_layer;
};

struct Results {
  Tensor output;
  Tensor hidden;
  Tensor cell;
};

Tensor sizes_tensor(c10::SymIntArrayRef sizes) {
  std::vector<int64_t> values;
  for (const auto& size : sizes) values.push_back(size.expect_int());
  return at::tensor(values, at::kLong);
}

/// The layers on CPU tensors, with autograd if the caller has it on.
Results run_layers(const Layers& layers, const Tensor& input, const Tensors& weights,
                   const Tensor& hidden, const Tensor& cell) {
  const bool biased = layers.weights_per_layer >= 4;
  const auto call = [&](auto plain, auto packed, const auto& state) {
    return layers.batch_sizes.empty()
               ? plain(input, state, weights, biased, layers.count, layers.dropout, layers.train,
                       layers.bidirectional, layers.batch_first)
               : packed(input, sizes_tensor(layers.batch_sizes), state, weights, biased,
                        layers.count, layers.dropout, layers.train, layers.bidirectional);
  };
#define SIMULATED_CALL(function) \
  [](auto&&... values) { return at::function(std::forward<decltype(values)>(values)...); }
  if (layers.mode == kLstm) {
    const Tensors state = {hidden, cell};
    auto [output, h, c] = call(SIMULATED_CALL(lstm), SIMULATED_CALL(lstm), at::TensorList(state));
    return {output, h, c};
  }
  auto [output, h] = layers.mode == kGru ? call(SIMULATED_CALL(gru), SIMULATED_CALL(gru), hidden)
                     : layers.mode == kTanhRnn
                         ? call(SIMULATED_CALL(rnn_tanh), SIMULATED_CALL(rnn_tanh), hidden)
                         : call(SIMULATED_CALL(rnn_relu), SIMULATED_CALL(rnn_relu), hidden);
#undef SIMULATED_CALL
  return {output, h, {}};
}

bool is_given(const MaybeTensor& tensor) { return tensor.has_value() && tensor->defined(); }
Tensor on_cpu(const MaybeTensor& tensor) { return is_given(tensor) ? tensor->cpu() : Tensor(); }
Tensor like(const Tensor& result, const Tensor& on) {
  return result.defined() ? result.detach().to(on.device()) : Tensor();
}
/// The weights in the shapes of layers: torch's autocast has them as columns of cuDNN's buffer.
Tensors weights_on_cpu(const Layers& layers, at::TensorList weights, int64_t hidden) {
  const int64_t gates = layers.mode == kLstm ? 4 : layers.mode == kGru ? 3 : 1;
  Tensors made;
  for (const Tensor& weight : weights) {
    const bool is_bias = static_cast<int64_t>(made.size()) % layers.weights_per_layer >= 2;
    const Tensor matrix = weight.cpu().reshape({gates * hidden, -1});
    made.push_back(is_bias ? matrix.flatten() : matrix);
  }
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rnn(
    const Tensor& input, at::TensorList weights, int64_t weights_per_layer,
    const MaybeTensor& buffer, const Tensor& hidden, const MaybeTensor& cell, int64_t mode,
    c10::SymInt /*hidden_size*/, c10::SymInt proj_size, int64_t count, bool batch_first,
    double dropout, bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes,
    const MaybeTensor& /*dropout_state*/) {
  TORCH_CHECK(proj_size == 0, "simulated CUDA: no projections in cuDNN's LSTM");
  const Layers layers{mode,  count,         batch_first, dropout,
                      train, bidirectional, batch_sizes, weights_per_layer};
  const auto seed = next_seed({}, input.device().index(), false);
  const CpuSeed seeded(seed);
  const Results results =
      run_layers(layers, input.cpu(), weights_on_cpu(layers, weights, hidden.size(2)), hidden.cpu(),
                 on_cpu(cell));
  const Tensor reserve = at::tensor({static_cast<int64_t>(seed)}, at::kLong).to(input.device());
  const Tensor no_cell = at::empty({0}, input.options());
  return {like(results.output, input), like(results.hidden, input),
          results.cell.defined() ? like(results.cell, input) : no_cell, reserve,
          buffer.value_or(no_cell)};
}

/// A tensor that gradients are asked for.
Tensor leaf(Tensor tensor) {
  return tensor.defined() ? tensor.detach().set_requires_grad(true) : tensor;
}

std::tuple<Tensor, Tensor, Tensor, Tensors> rnn_backward(
    const Tensor& input, at::TensorList weights, int64_t weights_per_layer,
    const Tensor& /*buffer*/, const Tensor& hidden, const MaybeTensor& cell,
    const Tensor& /*output*/, const MaybeTensor& grad_output, const MaybeTensor& grad_hidden,
    const MaybeTensor& grad_cell, int64_t mode, c10::SymInt /*hidden_size*/,
    c10::SymInt /*proj_size*/, int64_t count, bool batch_first, double dropout, bool train,
    bool bidirectional, c10::SymIntArrayRef batch_sizes, const MaybeTensor& /*dropout_state*/,
    const Tensor& reserve, std::array<bool, 4> /*wanted*/) {
  const Layers layers{mode,  count,         batch_first, dropout,
                      train, bidirectional, batch_sizes, weights_per_layer};
  Tensors inputs = {leaf(input.cpu()), leaf(hidden.cpu())};
  if (mode == kLstm) inputs.push_back(leaf(on_cpu(cell)));
  const auto states = static_cast<std::ptrdiff_t>(inputs.size());
  for (Tensor& weight : weights_on_cpu(layers, weights, hidden.size(2))) {
    inputs.push_back(leaf(std::move(weight)));
  }
  const CpuSeed seeded(static_cast<std::uint64_t>(reserve.cpu().item<int64_t>()));
  // The dispatcher leaves autograd off for kernels.
  const c10::impl::ForceDispatchKeyGuard autograd(
      c10::impl::tls_local_dispatch_key_set().included_,
      c10::impl::tls_local_dispatch_key_set().excluded_ - c10::autograd_dispatch_keyset -
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  const at::AutoGradMode with_gradients(true);
  const Results results = run_layers(layers, inputs[0], {inputs.begin() + states, inputs.end()},
                                     inputs[1], mode == kLstm ? inputs[2] : Tensor());
  Tensors outputs;
  Tensors gradients;
  const auto add = [&](const Tensor& output, const MaybeTensor& gradient) {
    if (output.defined() && is_given(gradient)) {
      outputs.push_back(output);
      gradients.push_back(gradient->cpu());
    }
  };
  add(results.output, grad_output);
  add(results.hidden, grad_hidden);
  add(results.cell, grad_cell);
  const Tensors made = torch::autograd::grad(outputs, inputs, gradients, /*retain_graph=*/false,
                                             /*create_graph=*/false, /*allow_unused=*/true);
  Tensors of_weights;
  for (auto i = static_cast<std::size_t>(states); i < made.size(); ++i) {
    const auto& weight = weights[i - static_cast<std::size_t>(states)];
    of_weights.push_back(like(made[i].reshape(weight.sizes()), input));
  }
  return {like(made[0], input), like(made[1], input),
          mode == kLstm ? like(made[2], input) : Tensor(), of_weights};
}

Tensor dropout_state(double /*dropout*/, bool /*train*/, int64_t /*seed*/,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                     std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
}

// -- cells --

Tensor sum_of(const Tensor& a, const Tensor& b, const MaybeTensor& bias_a,
              const MaybeTensor& bias_b) {
  const Tensor sum = a + b;
  return is_given(bias_a) ? sum + *bias_a + *bias_b : sum;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const Tensors gates = sum_of(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  const Tensor in = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor candidate = gates[2].tanh();
  const Tensor out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * candidate;
  return {out * cy.tanh(), cy, at::cat({in, forget, candidate, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy,
                                                      const MaybeTensor& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const Tensors gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &candidate = gates[2], &out = gates[3];
  const Tensor tanh = cy.tanh();
  const Tensor of_hy = is_given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  Tensor of_cell = of_hy * out * (1 - tanh * tanh);
  if (is_given(grad_cy)) of_cell = of_cell + *grad_cy;
  const Tensor of_gates =
      at::cat({of_cell * candidate * in * (1 - in), of_cell * cx * forget * (1 - forget),
               of_cell * in * (1 - candidate * candidate), of_hy * tanh * out * (1 - out)},
              1);
  return {of_gates, of_cell * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const bool biased = is_given(input_bias);
  const Tensors of_input = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const Tensors of_hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid();
  const Tensor update = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor fresh = (of_input[2] + reset * of_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const Tensors saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3];
  const Tensor of_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const Tensor of_update = grad_hy * (hx - fresh) * update * (1 - update);
  const Tensor of_reset = of_fresh * saved[4] * reset * (1 - reset);
  const Tensor of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad_hy * update, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

}  // namespace

void register_recurrent(Register add) {
  using c10::KernelFunction;
  add("aten::_cudnn_rnn", KernelFunction::makeFromUnboxedRuntimeFunction(&rnn));
  add("aten::_cudnn_rnn_backward", KernelFunction::makeFromUnboxedRuntimeFunction(&rnn_backward));
  add("aten::_cudnn_init_dropout_state",
      KernelFunction::makeFromUnboxedRuntimeFunction(&dropout_state));
  add("aten::_thnn_fused_lstm_cell", KernelFunction::makeFromUnboxedRuntimeFunction(&lstm_cell));
  add("aten::_thnn_fused_lstm_cell_backward_impl",
      KernelFunction::makeFromUnboxedRuntimeFunction(&lstm_cell_backward));
  add("aten::_thnn_fused_gru_cell", KernelFunction::makeFromUnboxedRuntimeFunction(&gru_cell));
  add("aten::_thnn_fused_gru_cell_backward",
      KernelFunction::makeFromUnboxedRuntimeFunction(&gru_cell_backward));
}

}  // namespace simulated_cuda
