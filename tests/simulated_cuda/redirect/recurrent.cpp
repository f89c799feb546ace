// SPDX-License-Identifier: Apache-2.0
//
// Recurrent layers: cuDNN's RNNs, and the fused LSTM and GRU cells.
//
// Stands for: results and gradients of torch's own layers; the one buffer that cuDNN keeps weights
// in. The backward pass computes the forward pass again. Does not stand for: cuDNN's order of
// weights in that buffer, and its numerics.
#include "simulated_cuda/redirect/libraries.h"
#include "simulated_cuda/redirect/operators.h"
#include "simulated_cuda/redirect/random.h"

#include <ATen/ATen.h>
#include <ATen/native/RNN.h>
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
Tensors on_cpu(at::TensorList tensors) {
  Tensors made;
  for (const Tensor& tensor : tensors) made.push_back(tensor.cpu());
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
      run_layers(layers, input.cpu(), on_cpu(weights), hidden.cpu(), on_cpu(cell));
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
  for (const Tensor& weight : weights) inputs.push_back(leaf(weight.cpu()));
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
    of_weights.push_back(like(made[i], input));
  }
  return {like(made[0], input), like(made[1], input),
          mode == kLstm ? like(made[2], input) : Tensor(), of_weights};
}

/// Puts all weights into one buffer, one behind the other.
Tensor flatten_weight(at::TensorList weights, int64_t /*weights_per_layer*/,
                      c10::SymInt /*input_size*/, int64_t /*mode*/, c10::SymInt /*hidden_size*/,
                      c10::SymInt /*proj_size*/, int64_t /*count*/, bool /*batch_first*/,
                      bool /*bidirectional*/) {
  Tensors flat;
  for (const Tensor& weight : weights) flat.push_back(weight.detach().reshape({-1}));
  const Tensor buffer = at::cat(flat);
  const at::NoGradGuard no_gradients;
  int64_t at = 0;
  for (const Tensor& weight : weights) {
    const std::vector<int64_t> sizes = weight.sizes().vec();
    weight.set_(buffer.narrow(0, at, weight.numel()).view(sizes));
    at += weight.numel();
  }
  return buffer;
}

Tensor dropout_state(double /*dropout*/, bool /*train*/, int64_t /*seed*/,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                     std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
}

// -- what torch's layers call for cuDNN: torch's own code asks cuDNN for the buffer's layout --

struct Given {
  const Tensor& input;
  c10::SymIntArrayRef batch_sizes;
  at::TensorList weights;
  bool biased;
  int64_t count;
  double dropout;
  bool train;
  bool bidirectional;
  bool batch_first;
};

Results call_rnn(const Given& given, int64_t mode, const Tensor& hidden, const Tensor& cell) {
  auto [output, hy, cy, reserve, buffer] = at::_cudnn_rnn_symint(
      given.input, given.weights, given.biased ? 4 : 2, {}, hidden,
      cell.defined() ? MaybeTensor(cell) : MaybeTensor(), mode, hidden.sym_size(2), 0, given.count,
      given.batch_first, given.dropout, given.train, given.bidirectional, given.batch_sizes, {});
  return {output, hy, cy};
}

std::vector<c10::SymInt> sizes_of(const Tensor& batch_sizes) {
  const Tensor on_host = batch_sizes.cpu().contiguous();
  const auto* const begin = on_host.const_data_ptr<int64_t>();
  return {begin, begin + on_host.numel()};
}

void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, at::TensorList state,
          at::TensorList weights, bool biased, int64_t count, double dropout, bool train,
          bool bidirectional, bool batch_first) {
  const Given given{input, {}, weights, biased, count, dropout, train, bidirectional, batch_first};
  const Results results = call_rnn(given, kLstm, state[0], state[1]);
  output = results.output;
  hy = results.hidden;
  cy = results.cell;
}

void packed_lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input,
                 const Tensor& batch_sizes, at::TensorList state, at::TensorList weights,
                 bool biased, int64_t count, double dropout, bool train, bool bidirectional) {
  const auto sizes = sizes_of(batch_sizes);
  const Given given{input, sizes, weights, biased, count, dropout, train, bidirectional, false};
  const Results results = call_rnn(given, kLstm, state[0], state[1]);
  output = results.output;
  hy = results.hidden;
  cy = results.cell;
}

template <int64_t kMode>
void plain(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& hidden,
           at::TensorList weights, bool biased, int64_t count, double dropout, bool train,
           bool bidirectional, bool batch_first) {
  const Given given{input, {}, weights, biased, count, dropout, train, bidirectional, batch_first};
  const Results results = call_rnn(given, kMode, hidden, {});
  output = results.output;
  hy = results.hidden;
}

template <int64_t kMode>
void packed(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& batch_sizes,
            const Tensor& hidden, at::TensorList weights, bool biased, int64_t count,
            double dropout, bool train, bool bidirectional) {
  const auto sizes = sizes_of(batch_sizes);
  const Given given{input, sizes, weights, biased, count, dropout, train, bidirectional, false};
  const Results results = call_rnn(given, kMode, hidden, {});
  output = results.output;
  hy = results.hidden;
}

void replace_layers() {
  using namespace at::native;
  lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_lstm);
  gru_cudnn_stub.set_cuda_dispatch_ptr(&plain<kGru>);
  gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed<kGru>);
  rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&plain<kTanhRnn>);
  rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed<kTanhRnn>);
  rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&plain<kReluRnn>);
  rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed<kReluRnn>);
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
  replace_layers();
  using c10::KernelFunction;
  add("aten::_cudnn_rnn", KernelFunction::makeFromUnboxedRuntimeFunction(&rnn));
  add("aten::_cudnn_rnn_backward", KernelFunction::makeFromUnboxedRuntimeFunction(&rnn_backward));
  add("aten::_cudnn_rnn_flatten_weight",
      KernelFunction::makeFromUnboxedRuntimeFunction(&flatten_weight));
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
