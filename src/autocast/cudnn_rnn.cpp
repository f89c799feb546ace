// SPDX-License-Identifier: Apache-2.0
#include "autocast/cudnn_rnn.h"

#include "autocast/arguments.h"
#include "autocast/op_names.h"
#include "autocast/policy_table.h"
#include "autocast/trace.h"
#include "trace/events.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight_ops.h>
#include <ATen/ops/_cudnn_rnn_ops.h>

#include <memory>
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

}  // namespace fastamp::autocast
