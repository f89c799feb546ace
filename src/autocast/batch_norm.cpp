// SPDX-License-Identifier: Apache-2.0
#include "autocast/batch_norm.h"

#include "autocast/arguments.h"
#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/torch_state.h"
#include "autocast/trace.h"
#include "trace/events.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>

namespace fastamp::autocast {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

struct Operands {
  const at::Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& running_mean;
  const OptionalTensor& running_var;

  std::array<const OptionalTensor*, 4> all_but_input() const {
    return {&weight, &bias, &running_mean, &running_var};
  }
};

std::unique_ptr<TracedCall> trace_batch_norm(PolicyDevice device, const Operands& given) {
  auto trace = std::make_unique<TracedCall>(traced_op(OpId::batch_norm, device));
  trace->see(given.input);
  for (const auto* tensor : given.all_but_input()) {
    trace->see(*tensor);
  }
  return trace;
}

c10::ScalarType input_dtype(OpPolicy policy, const Operands& given, c10::ScalarType lower,
                            PolicyDevice device) {
  if (policy == OpPolicy::kPromote) {
    const bool is_wide = forces_fp32(given.input, lower, device) ||
                         std::ranges::any_of(given.all_but_input(), [&](const auto* tensor) {
                           return forces_fp32(*tensor, lower, device);
                         });
    return is_wide ? c10::kFloat : lower;
  }
  return policy == OpPolicy::kFp32 ? c10::kFloat : lower;
}

bool all_have(c10::ScalarType dtype, const Operands& given) {
  return std::ranges::all_of(given.all_but_input(), [&](const auto* tensor) {
    return !tensor->has_value() || !(*tensor)->defined() || (*tensor)->scalar_type() == dtype;
  });
}

/// Writes back a statistic that the op has updated in a cast.
void write_back(const OptionalTensor& statistic, const OptionalTensor& updated) {
  if (statistic.has_value() && updated.has_value() && statistic->defined() &&
      !statistic->is_same(*updated)) {
    const at::NoGradGuard no_grad;
    statistic->copy_(*updated);
  }
}

}  // namespace

template <PolicyDevice kDevice>
at::Tensor BatchNormKernel::call(c10::DispatchKeySet keys, const at::Tensor& input,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 const OptionalTensor& running_mean,
                                 const OptionalTensor& running_var, bool training, double momentum,
                                 double eps, bool cudnn_enabled) {
  constexpr auto kKey = autocast_key(kDevice);
  const Operands given{input, weight, bias, running_mean, running_var};
  const auto trace = is_traced() ? trace_batch_norm(kDevice, given) : nullptr;
  const OpPolicy policy = policy_of(OpId::batch_norm, kDevice);
  if (policy == OpPolicy::kPass) {
    const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kKey);
    return at::_ops::batch_norm::redispatch(keys & below, input, weight, bias, running_mean,
                                            running_var, training, momentum, eps, cudnn_enabled);
  }
  if (policy == OpPolicy::kBanned) {
    throw_banned(OpId::batch_norm, kDevice);
  }
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(kKey);
  const auto lower = region_dtype(device_type(kDevice));
  const auto to = input_dtype(policy, given, lower, kDevice);
  const Caster caster{to, lower, kDevice};
  const Caster of_the_rest{all_have(to, given) ? to : c10::kFloat, lower, kDevice};
  using Optional = Argument<const OptionalTensor&>;
  using ReceivedOptional = Received<const OptionalTensor&>;
  const Optional var(ReceivedOptional{running_var, of_the_rest});
  const Optional mean(ReceivedOptional{running_mean, of_the_rest});
  const Optional b(ReceivedOptional{bias, of_the_rest});
  const Optional w(ReceivedOptional{weight, of_the_rest});
  const Argument<const at::Tensor&> x(Received<const at::Tensor&>{input, caster});
  auto result = at::_ops::batch_norm::call(x.get(), w.get(), b.get(), mean.get(), var.get(),
                                           training, momentum, eps, cudnn_enabled);
  if (training) {
    write_back(running_mean, mean.get());
    write_back(running_var, var.get());
  }
  return result;
}

void BatchNormKernel::implement(torch::Library& library, const char* qualified_name,
                                PolicyDevice device) {
  if (device == PolicyDevice::kCpu) {
    library.impl(qualified_name, TORCH_FN((&BatchNormKernel::call<PolicyDevice::kCpu>)));
  } else {
    library.impl(qualified_name, TORCH_FN((&BatchNormKernel::call<PolicyDevice::kCuda>)));
  }
}

}  // namespace fastamp::autocast
