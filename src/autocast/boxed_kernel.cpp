// SPDX-License-Identifier: Apache-2.0
#include "autocast/boxed_kernel.h"

#include "autocast/arguments.h"
#include "autocast/boxed_arguments.h"
#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/torch_state.h"
#include "autocast/trace.h"
#include "autocast/unify.h"
#include "trace/events.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace fastamp::autocast {
namespace {

bool is_optional_dtype(const c10::Argument& argument) {
  return argument.real_type()->str() == "ScalarType?";
}

void cast_arguments(torch::jit::Stack& stack, std::size_t count, const Caster& caster) {
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(count); value != stack.end();
       ++value) {
    *value = replace_tensors(*value, caster);
  }
}

/// Casts all arguments but the one that the op writes to its dtype.
void follow_written(const c10::FunctionSchema& schema, torch::jit::Stack& stack,
                    c10::ScalarType lower, PolicyDevice device) {
  const auto& arguments = schema.arguments();
  const auto written = std::ranges::find_if(arguments, is_written) - arguments.begin();
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(arguments.size());
  const auto& target = *(first + written);
  if (!target.isTensor() || !is_eligible(target.toTensor(), device)) {
    return;
  }
  const Caster caster{target.toTensor().scalar_type(), lower, device};
  for (auto value = first; value != stack.end(); ++value) {
    if (value != first + written) {
      *value = replace_tensors(*value, caster);
    }
  }
}

c10::ScalarType run_dtype(OpPolicy policy, BoxedArguments arguments, c10::ScalarType lower,
                          PolicyDevice device) {
  bool wide = policy == OpPolicy::kFp32;
  if (policy == OpPolicy::kPromote) {
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      wide = wide || forces_fp32(tensor, lower, device);
    });
  } else if (policy == OpPolicy::kLowerDense) {
    for_each_tensor(arguments, [&](const at::Tensor& tensor) { wide = wide || is_sparse(tensor); });
  }
  return wide ? c10::kFloat : lower;
}

void set_dtype(const c10::FunctionSchema& schema, torch::jit::Stack& stack, PolicyDevice device) {
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  if (!is_eligible(first->toTensor(), device)) {
    return;
  }
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = *(first + static_cast<std::ptrdiff_t>(i));
    if (is_optional_dtype(schema.arguments()[i]) && value.isNone()) {
      value = c10::kFloat;
    }
  }
}

void show(TracedCall& trace, const c10::FunctionSchema& schema, BoxedArguments arguments) {
  for_each_tensor(arguments, [&](const at::Tensor& tensor) { trace.see(tensor); });
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_optional_dtype(schema.arguments()[i]) && !arguments[i].isNone()) {
      trace.see(std::optional(arguments[i].toScalarType()));
    }
  }
}

}  // namespace

OpCapabilities boxed_capabilities(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto writes = std::ranges::count_if(arguments, is_written);
  const bool writes_tensor = std::ranges::all_of(arguments, [](const c10::Argument& argument) {
    return !is_written(argument) || argument.type()->kind() == c10::TypeKind::TensorType;
  });
  const auto may_be_cast = [](const c10::Argument& argument) {
    return !is_written(argument) && holds_tensors(*argument.type());
  };
  const bool tensors = std::ranges::any_of(arguments, may_be_cast) &&
                       std::ranges::any_of(arguments, is_dispatched) &&
                       std::ranges::all_of(arguments, [](const c10::Argument& argument) {
                         return reaches_all_tensors(*argument.type());
                       });
  const bool set_opt_dtype = !arguments.empty() && arguments[0].type()->str() == "Tensor" &&
                             std::ranges::any_of(arguments, is_optional_dtype);
  return {.lower = tensors && writes == 0,
          .fp32 = tensors && (writes == 0 || (writes == 1 && writes_tensor)),
          .set_opt_dtype = set_opt_dtype,
          .append_dtype = false,
          .unify = can_unify(schema)};
}

void NestedInputKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                   torch::jit::Stack* stack) const {
  const auto key = autocast_key(device_);
  const auto count = op.schema().arguments().size();
  const auto& first = torch::jit::peek(*stack, 0, count);
  if (!first.isTensor() || !first.toTensor().is_nested()) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
    return;
  }
  const auto lower = region_dtype(device_type(device_));
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(key);
  cast_arguments(*stack, count, {lower, lower, device_});
  op.callBoxed(stack);
}

void BoxedKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) const {
  const auto key = autocast_key(device_);
  const auto count = op.schema().arguments().size();
  const OpPolicy policy = policy_of(op_, device_);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
  if (policy == OpPolicy::kUnify ||
      (policy == OpPolicy::kPass && policy_of(kEveryOp, device_) == OpPolicy::kUnify)) {
    call_unified(op, below, stack, device_);
    return;
  }
  std::unique_ptr<TracedCall> trace;
  if (is_traced()) [[unlikely]] {
    trace = std::make_unique<TracedCall>(traced_op(op_, device_));
    show(*trace, op.schema(), torch::jit::last(*stack, count));
  }
  if (policy == OpPolicy::kPass) {
    op.redispatchBoxed(below, stack);
    return;
  }
  if (policy == OpPolicy::kBanned) {
    throw_banned(op_, device_);
  }
  const auto lower = region_dtype(device_type(device_));
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(key);
  if (policy == OpPolicy::kSetOptDtype) {
    set_dtype(op.schema(), *stack, device_);
  } else if (policy == OpPolicy::kPromote && op.schema().is_mutable()) {
    follow_written(op.schema(), *stack, lower, device_);
  } else {
    const auto to = run_dtype(policy, torch::jit::last(*stack, count), lower, device_);
    cast_arguments(*stack, count, {to, lower, device_});
  }
  op.callBoxed(stack);
}

}  // namespace fastamp::autocast
