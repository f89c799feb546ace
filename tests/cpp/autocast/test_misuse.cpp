// SPDX-License-Identifier: Apache-2.0
// What autocast's public classes and functions do with undefined tensors, empty lists and empty
// names, and when they are ended twice.

#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/trace.h>

#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::CastTogetherGuard;
using fastamp::KeepCastsGuard;
using fastamp::OpPolicy;
using fastamp::OpPolicyGuard;
using fastamp::Trace;
using fastamp::test::error_text;

namespace {

at::ScalarType linear_in_a_region(const at::Tensor& weight) {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  return at::linear(at::ones({2, 4}), weight).scalar_type();
}

}  // namespace

TEST_CASE("misuse: lists of weights may be empty and may hold undefined tensors", "[autocast]") {
  const auto weight = at::ones({3, 4}).requires_grad_(true);
  const std::vector<std::vector<at::Tensor>> lists = {{}, {at::Tensor()}, {at::Tensor(), weight}};
  const auto& weights = lists[GENERATE(range<std::size_t>(0, 3))];
  KeepCastsGuard kept(weights);
  CastTogetherGuard together(weights);
  CHECK(linear_in_a_region(weight) == c10::kBFloat16);
  CHECK(linear_in_a_region(weight) == c10::kBFloat16);
  CHECK(fastamp::kept_casts().copies == (weights.size() == 2 ? 1 : 0));
  fastamp::drop_kept_casts(weights);
  CHECK(fastamp::kept_casts().copies == 0);
  for (int i = 0; i < 2; ++i) {
    kept.release();
    together.release();
  }
  CHECK(linear_in_a_region(weight) == c10::kBFloat16);
  CHECK(fastamp::kept_casts().copies == 0);
}

TEST_CASE("misuse: empty names are refused by function", "[autocast]") {
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"op_policy: expected op ", [] { fastamp::op_policy("", c10::kCPU); }},
      {"set_op_policy: expected op ", [] { fastamp::set_op_policy("", OpPolicy::kFp32); }},
      {"OpPolicyGuard: expected op ", [] { const OpPolicyGuard guard({{"", OpPolicy::kFp32}}); }},
      {"OpPolicyGuard: expected device ",
       [] { const OpPolicyGuard guard({{"mm", OpPolicy::kFp32, c10::kMPS}}); }},
      {"register_op: expected ", [] { fastamp::register_op("", OpPolicy::kFp32); }},
      {"register_op: expected ", [] { fastamp::register_op("::", OpPolicy::kFp32); }},
      {"unregister_op: expected ", [] { fastamp::unregister_op(""); }},
      {"op_policy_from_string: expected ", [] { fastamp::op_policy_from_string(""); }},
      {"trace_order_from_string: expected name ", [] { fastamp::trace_order_from_string(""); }},
  };
  for (const auto& [start, call] : calls) {
    const auto text = error_text<c10::ValueError>(call);
    INFO(start << " / " << text);
    CHECK(text.find(start) == 0);
  }
  CHECK(fastamp::op_policy("mm", c10::kCPU) == OpPolicy::kLower);
  const OpPolicyGuard nothing({});
  CHECK(fastamp::op_policy("mm", c10::kCPU) == OpPolicy::kLower);
}

TEST_CASE("misuse: a trace answers before, between and after what it records", "[autocast]") {
  Trace trace;
  CHECK(trace.rows().empty());
  CHECK(trace.totals().casts() == 0);
  CHECK_FALSE(trace.table().empty());
  linear_in_a_region(at::ones({3, 4}));
  for (int i = 0; i < 2; ++i) {
    trace.stop();
    CHECK(trace.rows().size() == 1);
    CHECK_FALSE(trace.table(fastamp::TraceOrder::kName, 0).empty());
  }
  linear_in_a_region(at::ones({3, 4}));
  CHECK(trace.rows().size() == 1);
}

TEST_CASE("misuse: a region for a device without autocast is refused and opens nothing",
          "[autocast]") {
  CHECK_FALSE(error_text<c10::Error>([] { const AutocastGuard region(c10::kMeta); }).empty());
  CHECK_FALSE(fastamp::test::public_state().cpu_enabled);
}
