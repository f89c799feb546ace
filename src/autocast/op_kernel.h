// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/arguments.h"
#include "autocast/float8_interface.h"
#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/op_table.h"
#include "autocast/rnn.h"
#include "autocast/torch_state.h"
#include "autocast/trace.h"
#include "trace/events.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace fastamp::autocast {

/// Stands for the overload with an output dtype in ops that have none.
struct NoRedispatch {};

template <class First, class... Rest>
constexpr bool first_is_tensor() {
  return std::is_same_v<First, const at::Tensor&>;
}

/// The autocast kernel of one op, generated from its schema: reads the op's policy, casts the
/// arguments accordingly and calls the op again below autocast.
///
/// @tparam Op          at::_ops struct: schema type, names and the dispatcher call.
/// @tparam Redispatch  at::_ops struct of the overload that append_dtype calls, or NoRedispatch.
template <class Op, OpId Id, class Redispatch, class Schema>
struct OpKernel;

template <class Op, OpId Id, class Redispatch, class Result, class... Args>
struct OpKernel<Op, Id, Redispatch, Result(Args...)> {
  static constexpr OpCapabilities kCapabilities{
      .lower = (Argument<Args>::kHoldsTensors || ...),
      .fp32 = (Argument<Args>::kHoldsTensors || ...),
      .set_opt_dtype = first_is_tensor<Args...>() &&
                       (std::is_same_v<std::decay_t<Args>, std::optional<c10::ScalarType>> || ...),
      .append_dtype = !std::is_same_v<Redispatch, NoRedispatch>,
  };

  template <PolicyDevice kDevice>
  static Result call(c10::DispatchKeySet keys, Args... args) {
    constexpr auto kKey = autocast_key(kDevice);
    std::unique_ptr<TracedCall> trace;
    if (is_traced()) [[unlikely]] {
      trace = std::make_unique<TracedCall>(traced_op(Id, kDevice));
      (trace->see(std::as_const(args)), ...);
    }
    if (policy_of(Id, kDevice) == OpPolicy::kPass) {
      // As if no kernel were registered: the ops inside a composite one must still be autocast.
      const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kKey);
      return Op::redispatch(keys & below, static_cast<Args&&>(args)...);
    }
    const c10::impl::ExcludeDispatchKeyGuard below_autocast(kKey);
    return apply(kDevice, args...);
  }

  static void implement(torch::Library& library, const char* qualified_name, PolicyDevice device) {
    if (device == PolicyDevice::kCpu) {
      library.impl(qualified_name, TORCH_FN((&OpKernel::call<PolicyDevice::kCpu>)));
    } else {
      library.impl(qualified_name, TORCH_FN((&OpKernel::call<PolicyDevice::kCuda>)));
    }
  }

 private:
  /// These can return an argument or a view of it: the user may edit it, and a shared cast with it.
  static constexpr bool kSharesCasts = Id != OpId::einsum && Id != OpId::chain_matmul;

  static Result apply(PolicyDevice device, std::remove_reference_t<Args>&... args) {
    const OpPolicy policy = policy_of(Id, device);
    if constexpr (kCapabilities.lower) {
      const auto lower = region_dtype(device_type(device));
      switch (policy) {
        case OpPolicy::kLowerDense:
          if ((holds_sparse(std::as_const(args)) || ...)) {
            return call_cast({c10::kFloat, lower, device}, args...);
          }
          [[fallthrough]];
        case OpPolicy::kLower:
          if constexpr (can_run_in_float8(Id)) {
            if (const auto* setting = float8_in_force(device)) [[unlikely]] {
              Result in_float8 = run_in_float8(OpTag<Id>(), device, *setting, args...);
              if (in_float8.defined()) {
                return in_float8;
              }
            }
          }
          return call_cast({lower, lower, device, kSharesCasts}, args...);
        case OpPolicy::kFp32:
          return call_cast({c10::kFloat, lower, device}, args...);
        case OpPolicy::kPromote: {
          const bool wide = (forces_fp32(std::as_const(args), lower, device) || ...);
          return call_cast({wide ? c10::kFloat : lower, lower, device}, args...);
        }
        default:
          break;
      }
    }
    if constexpr (kCapabilities.set_opt_dtype) {
      if (policy == OpPolicy::kSetOptDtype && is_eligible(first(args...), device)) {
        return Op::call(with_default_dtype<Args>(args)...);
      }
    }
    if constexpr (kCapabilities.append_dtype) {
      if (policy == OpPolicy::kAppendDtype) {
        const at::Tensor& input = first(args...);
        const auto dtype = is_eligible(input, device) ? c10::kFloat : input.scalar_type();
        return Redispatch::call(static_cast<Args&&>(args)..., dtype);
      }
    }
    if (policy == OpPolicy::kBanned) {
      throw_banned(Id, device);
    }
    return Op::call(static_cast<Args&&>(args)...);
  }

  static Result call_cast(const Caster& caster, std::remove_reference_t<Args>&... args) {
    std::tuple<Argument<Args>...> held(Received<Args>{args, caster}...);
    return std::apply(
        [](auto&... argument) -> Result {
          if constexpr (Id == OpId::mkldnn_rnn_layer) {
            return run_rnn_layer(argument.get()...);
          } else {
            return Op::call(argument.get()...);
          }
        },
        held);
  }

  template <class First, class... Rest>
  static First& first(First& argument, Rest&... /*rest*/) {
    return argument;  // NOLINT(bugprone-return-const-ref-from-parameter): lives as long as the call
  }
};

}  // namespace fastamp::autocast
