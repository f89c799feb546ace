// SPDX-License-Identifier: Apache-2.0
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy_preset.h>

#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <cstdlib>
#include <string>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::op_policy;
using fastamp::op_policy_preset;
using fastamp::OpPolicy;
using fastamp::OpPolicyGuard;

namespace {

/// Ends with the op table as it was.
class Restored {
 public:
  Restored() = default;
  ~Restored() {
    ::unsetenv("FASTAMP_POLICY");
    ::unsetenv("FASTAMP_POLICY_FILE");
    const auto is_known = [&](const std::string& op) {
      return std::ranges::any_of(before_, [&](const auto& row) { return row.op == op; });
    };
    for (const auto& row : fastamp::op_table()) {
      if (!is_known(row.op)) {
        fastamp::unregister_op(row.op.find('.') == std::string::npos ? row.op + ".default"
                                                                     : row.op);
      }
    }
    fastamp::reset_op_policies();
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;
  Restored(Restored&&) = delete;
  Restored& operator=(Restored&&) = delete;

 private:
  std::vector<fastamp::OpTableRow> before_ = fastamp::op_table();
};

}  // namespace

TEST_CASE("op_policy_preset: what runs in which dtype under each", "[autocast]") {
  const Restored restored;
  const auto x = at::ones({4, 4}, at::kBFloat16);
  const auto dtypes = [&](const std::string& name) {
    const OpPolicyGuard policies(op_policy_preset(name));
    const fastamp::AutocastGuard region(c10::kCPU, at::kBFloat16);
    return std::vector<at::ScalarType>{at::mm(x, x).scalar_type(), at::softmax(x, 1).scalar_type(),
                                       at::gelu(x).scalar_type(), at::relu(x).scalar_type()};
  };
  constexpr auto kLow = at::kBFloat16;
  CHECK(dtypes("torch") == std::vector{kLow, kLow, kLow, kLow});
  CHECK(dtypes("cuda") == std::vector{kLow, at::kFloat, kLow, kLow});
  CHECK(dtypes("wide") == std::vector{kLow, at::kFloat, kLow, kLow});
  CHECK(dtypes("OD") == std::vector{kLow, at::kFloat, at::kFloat, kLow});
  CHECK(dtypes("torch") == std::vector{kLow, kLow, kLow, kLow});
}

TEST_CASE("op_policy_preset: one device, and refusals", "[autocast]") {
  const Restored restored;
  for (const auto& edit : op_policy_preset("OD", c10::kCUDA)) {
    CHECK(edit.device == c10::kCUDA);
  }
  const auto size = fastamp::op_table().size();
  CHECK(error_text<c10::ValueError>([] { op_policy_preset("od"); }) ==
        "op_policy_preset: expected name to be one of torch, cuda, OD, wide, supported, unify, "
        "got 'od'.");
  CHECK(error_text<c10::ValueError>([] {
          op_policy_preset("wide", c10::kMPS);
        }).find("op_policy_preset: expected device") == 0);
  CHECK(fastamp::op_table().size() == size);
}

TEST_CASE("policies_from_environment: the variable's policies, or all as it was", "[autocast]") {
  const Restored restored;
  fastamp::policies_from_environment();
  ::setenv("FASTAMP_POLICY", " layer_norm = lower, softmax.int=fp32,", 1);
  fastamp::policies_from_environment();
  CHECK(op_policy("layer_norm", c10::kCUDA) == OpPolicy::kLower);
  CHECK(op_policy("softmax.int", c10::kCPU) == OpPolicy::kFp32);
  const auto refusal = [](const char* text) {
    ::setenv("FASTAMP_POLICY", text, 1);
    return error_text<c10::ValueError>([] { fastamp::policies_from_environment(); });
  };
  CHECK(refusal("mm=fp32,layer_norm").find("layer_norm=lower,pow=fp32', got 'layer_norm'") !=
        std::string::npos);
  CHECK(refusal("mm=fp32,poow=fp32").find("FASTAMP_POLICY: expected op to name an op") == 0);
  CHECK(refusal("mm=fp32,pow=half").find("FASTAMP_POLICY: expected policy") == 0);
  CHECK(op_policy("mm", c10::kCPU) == OpPolicy::kLower);
  ::unsetenv("FASTAMP_POLICY");
  ::setenv("FASTAMP_POLICY_FILE", "policy.toml", 1);
  const CapturedWarnings warnings;
  fastamp::policies_from_environment();
  CHECK(warnings.has("FASTAMP_POLICY_FILE is read in Python only"));
}
