// SPDX-License-Identifier: Apache-2.0
#include "autocast/kernels/boxed_kernel.h"

#include "autocast/kernels/arguments.h"
#include "autocast/policy/policy_table.h"
#include "autocast/table/op_names.h"
#include "autocast/torch/torch_state.h"
#include "autocast/trace/tracing.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <memory>

namespace fastamp::autocast {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

bool is_optional_dtype(const c10::Argument& argument) {
  return argument.real_type()->str() == "ScalarType?";
}

/// Calls `function` with every defined tensor among the arguments, those in lists too.
template <class Function>
void for_each_tensor(Arguments arguments, const Function& function) {
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        function(value.toTensor());
      }
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        function(tensor);
      }
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) {
          function(element.toTensor());
        }
      }
    }
  }
}

c10::IValue cast_value(const c10::IValue& value, const Caster& caster) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && caster.wants(tensor) ? c10::IValue(caster(tensor)) : value;
  }
  if (value.isTensorList()) {
    return cast_list(value.toTensorVector(), caster);
  }
  if (value.isList()) {
    c10::impl::GenericList out(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) {
      out.push_back(cast_value(element, caster));
    }
    return out;
  }
  return value;
}

void cast_arguments(torch::jit::Stack& stack, std::size_t count, const Caster& caster) {
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(count); value != stack.end();
       ++value) {
    *value = cast_value(*value, caster);
  }
}

c10::ScalarType run_dtype(OpPolicy policy, Arguments arguments, c10::ScalarType lower,
                          PolicyDevice device) {
  bool wide = policy == OpPolicy::fp32;
  if (policy == OpPolicy::promote) {
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      wide = wide || forces_fp32(tensor, lower, device);
    });
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

void show(TracedCall& trace, const c10::FunctionSchema& schema, Arguments arguments) {
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
  const bool writes = std::ranges::any_of(arguments, [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  });
  const bool tensors = std::ranges::any_of(arguments, [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  });
  const bool set_opt_dtype = !arguments.empty() && arguments[0].type()->str() == "Tensor" &&
                             std::ranges::any_of(arguments, is_optional_dtype);
  return {.lower = tensors && !writes,
          .fp32 = tensors && !writes,
          .set_opt_dtype = set_opt_dtype,
          .append_dtype = false};
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
  std::unique_ptr<TracedCall> trace;
  if (is_traced()) [[unlikely]] {
    trace = std::make_unique<TracedCall>(op_, device_);
    show(*trace, op.schema(), torch::jit::last(*stack, count));
  }
  const OpPolicy policy = policy_of(op_, device_);
  if (policy == OpPolicy::pass) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
    return;
  }
  if (policy == OpPolicy::banned) {
    throw_banned(op_, device_);
  }
  const auto lower = region_dtype(device_type(device_));
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(key);
  if (policy == OpPolicy::set_opt_dtype) {
    set_dtype(op.schema(), *stack, device_);
  } else {
    const auto to = run_dtype(policy, torch::jit::last(*stack, count), lower, device_);
    cast_arguments(*stack, count, {to, lower, device_});
  }
  op.callBoxed(stack);
}

}  // namespace fastamp::autocast
