// SPDX-License-Identifier: Apache-2.0
// AutocastContext: the regions of one thread or moment put in force elsewhere.

#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/context.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>

#include <ATen/core/ivalue.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <thread>

using fastamp::AutocastContext;
using fastamp::AutocastContextGuard;
using fastamp::AutocastGuard;
using fastamp::OpPolicy;
using fastamp::OpPolicyGuard;
using namespace fastamp::test;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

c10::ScalarType mm_dtype() {
  const auto x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

/// The linear function of LibTorch's examples, with and without the forward pass's regions in its
/// backward.
template <bool kCarries>
struct LinearFunction : torch::autograd::Function<LinearFunction<kCarries>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& weight) {
    ctx->save_for_backward({input, weight});
    ctx->saved_data["autocast"] = AutocastContext::current().to_ivalue();
    return input.mm(weight.t());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    std::optional<AutocastContextGuard> as_in_forward;
    if (kCarries) {
      as_in_forward.emplace(AutocastContext::from_ivalue(ctx->saved_data["autocast"]));
    }
    const auto saved = ctx->get_saved_variables();
    return {grads[0].mm(saved[1]), grads[0].t().mm(saved[0])};
  }
};

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "AutocastContext: a function's backward runs as its forward did",
                 "[autocast][context]") {
  const auto input = at::randn({4, 8}).requires_grad_();
  const auto weight = at::randn({3, 8}).requires_grad_();
  const auto loss = [&](auto function) {
    const AutocastGuard region(c10::kCPU, c10::kHalf);
    return decltype(function)::apply(input, weight).sum();
  };
  CHECK_THROWS_AS(loss(LinearFunction<false>()).backward(), c10::Error);
  loss(LinearFunction<true>()).backward();
  const auto ones = at::ones({4, 3}, at::kHalf);
  CHECK(bit_equal(input.grad(), ones.mm(weight.detach().to(at::kHalf)).to(at::kFloat)));
  CHECK(bit_equal(weight.grad(), ones.t().mm(input.detach().to(at::kHalf)).to(at::kFloat)));
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastContext: other threads get what this one had, and no more",
                 "[autocast][context]") {
  std::optional<AutocastContext> context;
  {
    const AutocastGuard region(c10::kCPU, c10::kHalf, true, false);
    const OpPolicyGuard policies({{"exp", OpPolicy::kLower}});
    context = AutocastContext::current();
    CHECK(context->enabled(c10::kCPU));
    CHECK_FALSE(context->enabled(c10::kCUDA));
  }
  std::optional<c10::ScalarType> dtype;
  std::optional<PublicState> inside;
  std::optional<PublicState> after;
  std::optional<OpPolicy> policy;
  std::optional<OpPolicy> hidden;
  std::thread([&] {
    const AutocastGuard own(c10::kCPU, c10::kBFloat16);
    const OpPolicyGuard own_policies({{"mm", OpPolicy::kBanned}});
    {
      const AutocastContextGuard guard(*context);
      dtype = mm_dtype();
      inside = public_state();
      policy = fastamp::op_policy("exp", c10::kCPU);
      hidden = fastamp::op_policy("mm", c10::kCPU);
    }
    after = public_state();
  }).join();
  CHECK(dtype == c10::kHalf);
  CHECK_FALSE(inside->cache_enabled);
  CHECK(policy == OpPolicy::kLower);
  CHECK(hidden == OpPolicy::kLower);
  CHECK(after->cpu_dtype == c10::kBFloat16);
  CHECK(after->depth == 1);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastContext: no region hides those of the thread",
                 "[autocast][context]") {
  const auto none = AutocastContext::current();
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  AutocastContextGuard guard(none);
  CHECK(mm_dtype() == c10::kFloat);
  guard.release();
  guard.release();
  CHECK(mm_dtype() == c10::kBFloat16);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastContext: ends in any order with guards",
                 "[autocast][context]") {
  std::optional<AutocastGuard> region(std::in_place, c10::kCPU, c10::kHalf);
  std::optional<AutocastContextGuard> guard(std::in_place, AutocastContext::current());
  region.reset();
  CHECK(mm_dtype() == c10::kHalf);
  guard.reset();
  CHECK(mm_dtype() == c10::kFloat);
}

TEST_CASE("AutocastContext: other values are refused", "[autocast][context]") {
  const auto refused = [](const c10::IValue& value) {
    return error_text<c10::ValueError>([&] { AutocastContext::from_ivalue(value); });
  };
  for (const auto& value :
       {c10::IValue(), c10::IValue(3), c10::IValue("autocast"), c10::IValue(at::ones({1}))}) {
    CHECK(refused(value).find("AutocastContext::from_ivalue: expected a value from to_ivalue()") ==
          0);
  }
}
