// SPDX-License-Identifier: Apache-2.0
#include "autocast/rnn.h"

#include "autocast/arguments.h"
#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/trace.h"
#include "trace/events.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight_ops.h>
#include <ATen/ops/_cudnn_rnn_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mkldnn_rnn_layer_ops.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fastamp::autocast {
namespace {

constexpr auto kRnnDtype = c10::kHalf;

/// The shape of the layers, as cuDNN needs it to lay out their weights.
struct RnnLayout {
  int64_t weight_stride0;
  c10::SymInt input_size;
  int64_t mode;
  c10::SymInt hidden_size;
  c10::SymInt proj_size;
  int64_t num_layers;
  bool batch_first;
  bool bidirectional;
};

/// Moves freshly cast weights into one buffer in cuDNN's layout, keeping their autograd history,
/// and returns it.
at::Tensor flatten(const std::vector<at::Tensor>& casts, const RnnLayout& layout) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> aliases;
  aliases.reserve(casts.size());
  for (const auto& cast : casts) {
    aliases.push_back(cast.detach());
  }
  at::Tensor buffer = at::_ops::_cudnn_rnn_flatten_weight::call(
      aliases, layout.weight_stride0, layout.input_size, layout.mode, layout.hidden_size,
      layout.proj_size, layout.num_layers, layout.batch_first, layout.bidirectional);
  for (std::size_t i = 0; i < casts.size(); ++i) {
    casts[i].set_data(aliases[i]);
  }
  return buffer;
}

std::unique_ptr<TracedCall> trace_call(PolicyDevice device, const at::Tensor& input,
                                       at::TensorList weight, const at::Tensor& hx,
                                       const std::optional<at::Tensor>& cx) {
  auto trace = std::make_unique<TracedCall>(traced_op(OpId::_cudnn_rnn, device));
  trace->see(input);
  trace->see(weight);
  trace->see(hx);
  trace->see(cx);
  return trace;
}

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

/// Computes as torch an LSTM without oneDNN, but that all of it is in the arguments' dtype.
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

template <PolicyDevice kDevice>
CudnnRnnKernel::Result CudnnRnnKernel::call(
    const at::Tensor& input, at::TensorList weight, int64_t weight_stride0,
    const std::optional<at::Tensor>& weight_buf, const at::Tensor& hx,
    const std::optional<at::Tensor>& cx, int64_t mode,
    c10::SymInt hidden_size,  // NOLINT(performance-unnecessary-value-param): the op's schema type
    c10::SymInt proj_size,    // NOLINT(performance-unnecessary-value-param)
    int64_t num_layers, bool batch_first, double dropout, bool train, bool bidirectional,
    c10::SymIntArrayRef batch_sizes, const std::optional<at::Tensor>& dropout_state) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(autocast_key(kDevice));
  const auto trace = is_traced() ? trace_call(kDevice, input, weight, hx, cx) : nullptr;
  const auto run = [&](const at::Tensor& x, at::TensorList weights,
                       const std::optional<at::Tensor>& buffer, const at::Tensor& h,
                       const std::optional<at::Tensor>& c) {
    return at::_ops::_cudnn_rnn::call(x, weights, weight_stride0, buffer, h, c, mode, hidden_size,
                                      proj_size, num_layers, batch_first, dropout, train,
                                      bidirectional, batch_sizes, dropout_state);
  };
  const OpPolicy policy = policy_of(OpId::_cudnn_rnn, kDevice);
  if (policy == OpPolicy::kBanned) {
    throw_banned(OpId::_cudnn_rnn, kDevice);
  }
  if (policy != OpPolicy::kLower) {
    return run(input, weight, weight_buf, hx, cx);
  }
  const Caster caster{kRnnDtype, kRnnDtype, kDevice};
  const Argument<const at::Tensor&> x(Received<const at::Tensor&>{input, caster});
  const Argument<const at::Tensor&> h(Received<const at::Tensor&>{hx, caster});
  const Argument<const std::optional<at::Tensor>&> c(
      Received<const std::optional<at::Tensor>&>{cx, caster});
  const bool has_buffer = weight_buf.has_value() && weight_buf->defined();
  if (!caster.wants(has_buffer ? *weight_buf : weight[0])) {
    return run(x.get(), weight, weight_buf, h.get(), c.get());
  }
  // Not through the weight cache: the casts are about to be moved into the buffer.
  std::vector<at::Tensor> casts;
  casts.reserve(weight.size());
  for (const auto& w : weight) {
    casts.push_back(w.to(kRnnDtype));
    note_cast(CastEvent::kWeightCast, casts.back());
  }
  const at::Tensor buffer = flatten(casts, {weight_stride0, input.sym_size(-1), mode, hidden_size,
                                            proj_size, num_layers, batch_first, bidirectional});
  return run(x.get(), casts, buffer, h.get(), c.get());
}

void CudnnRnnKernel::implement(torch::Library& library, const char* qualified_name,
                               PolicyDevice device) {
  if (device == PolicyDevice::kCpu) {
    library.impl(qualified_name, TORCH_FN((&CudnnRnnKernel::call<PolicyDevice::kCpu>)));
  } else {
    library.impl(qualified_name, TORCH_FN((&CudnnRnnKernel::call<PolicyDevice::kCuda>)));
  }
}

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
