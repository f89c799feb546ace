// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/context.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/policy_preset.h>
#include <fastamp/autocast/registration.h>
#include <fastamp/autocast/trace.h>

#include <ATen/ops/add.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>

using fastamp::AutocastGuard;
using fastamp::OpPolicy;
using fastamp::OpPolicyGuard;
using namespace fastamp::test;

namespace {

int g_calls = 0;

at::Tensor strict_product(const at::Tensor& a, const at::Tensor& b) {
  ++g_calls;
  if (a.scalar_type() != b.scalar_type()) {
    throw std::invalid_argument("strict_product: expected one dtype");
  }
  return a * b;
}

TORCH_LIBRARY(fastamp_unify_cpp, library) {
  library.def("product(Tensor a, Tensor b) -> Tensor");
  library.impl("product", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(strict_product));
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp_unify_cpp::product", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(a, b);
}

struct Unifies : LeavesNoTrace {
  Unifies() = default;
  Unifies(const Unifies&) = delete;
  Unifies& operator=(const Unifies&) = delete;
  Unifies(Unifies&&) = delete;
  Unifies& operator=(Unifies&&) = delete;
  ~Unifies() { fastamp::reset_op_policies(); }

  at::Tensor wide = at::randn({4, 4});
  at::Tensor low = at::randn({4, 4}).to(c10::kBFloat16);
};

}  // namespace

TEST_CASE_METHOD(Unifies, "unify: a refused mix runs in the region's dtype, with gradients",
                 "[autocast][policy]") {
  wide.requires_grad_();
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK_THROWS_AS(at::lerp(wide, low, 0.5), c10::Error);
  {
    const OpPolicyGuard unify(fastamp::op_policy_preset("unify"));
    for (int i = 0; i < 2; ++i) {
      const auto found = at::lerp(wide, low, 0.5);
      CHECK(found.scalar_type() == c10::kBFloat16);
      CHECK(at::equal(found, at::lerp(wide.to(c10::kBFloat16), low, 0.5)));
    }
    at::lerp(wide, low, 0.5).sum().backward();
    CHECK(at::equal(wide.grad(), at::ones({4, 4}) * 0.5));
    CHECK(at::add(wide, low).scalar_type() == c10::kFloat);
    CHECK_THROWS_AS(at::lerp(wide, at::ones({3}, c10::kBFloat16), 0.5), c10::Error);
  }
  CHECK_THROWS_AS(at::lerp(wide, low, 0.5), c10::Error);
}

TEST_CASE_METHOD(Unifies, "unify: what is written keeps its dtype", "[autocast][policy]") {
  fastamp::set_op_policy("*", OpPolicy::kUnify, c10::kCPU);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto rows = at::tensor({0, 2});
  auto target = at::zeros({4, 4});
  target.index_put_({rows}, low.slice(0, 0, 2));
  CHECK(at::equal(target.slice(0, 0, 1), low.slice(0, 0, 1).to(c10::kFloat)));
  low.index_add_(0, rows, wide.slice(0, 0, 2));
  CHECK(low.scalar_type() == c10::kBFloat16);
}

TEST_CASE_METHOD(Unifies, "unify: another library's op and its exceptions", "[autocast][policy]") {
  const OpPolicyGuard unify({{"*", OpPolicy::kUnify}});
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  g_calls = 0;
  CHECK(product(wide, low).scalar_type() == c10::kBFloat16);
  CHECK(product(wide, low).scalar_type() == c10::kBFloat16);
  CHECK(g_calls == 3);
  CHECK_THROWS_AS(product(wide.to(c10::kDouble), low), std::invalid_argument);
}

TEST_CASE_METHOD(Unifies, "unify: contexts and traces know of it", "[autocast][policy]") {
  const auto context = [] {
    const OpPolicyGuard unify({{"*", OpPolicy::kUnify, c10::kCPU}});
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    return fastamp::AutocastContext::current();
  }();
  const fastamp::AutocastContextGuard as_there(context);
  fastamp::Trace trace;
  at::lerp(wide, low, 0.5);
  const auto rows = trace.rows();
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].op == "lerp.Scalar");
  CHECK(rows[0].policy == OpPolicy::kUnify);
  CHECK(rows[0].run_dtype == c10::kBFloat16);
}

TEST_CASE_METHOD(Unifies, "unify: refused for other policies, and for ops of the table",
                 "[autocast][policy]") {
  CHECK_THROWS_AS(fastamp::set_op_policy("*", OpPolicy::kLower), c10::ValueError);
  CHECK_THROWS_AS(fastamp::set_op_policy("mm", OpPolicy::kUnify), c10::ValueError);
  CHECK(fastamp::op_policy("*", c10::kCPU) == OpPolicy::kPass);
  CHECK(fastamp::op_policy_from_string("unify") == OpPolicy::kUnify);
  const auto key = c10::DispatchKey::AutocastCPU;
  const auto lerp = c10::Dispatcher::singleton().findSchemaOrThrow("aten::lerp", "Scalar");
  fastamp::register_kernels();
  CHECK_FALSE(lerp.hasKernelForDispatchKey(key));
  fastamp::set_op_policy("*", OpPolicy::kUnify);
  CHECK(lerp.hasKernelForDispatchKey(key));
  fastamp::unregister_kernels();
  CHECK_FALSE(lerp.hasKernelForDispatchKey(key));
  fastamp::register_kernels();
  CHECK(lerp.hasKernelForDispatchKey(key));
  fastamp::set_op_policy("*", OpPolicy::kPass);
  CHECK_FALSE(lerp.hasKernelForDispatchKey(key));
}
