// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/policy.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

using fastamp::OpPolicy;
using namespace fastamp::test;

namespace {

const std::vector<OpPolicy> kPolicies{
    OpPolicy::kPass,        OpPolicy::kLower,       OpPolicy::kLowerDense, OpPolicy::kFp32,
    OpPolicy::kSetOptDtype, OpPolicy::kAppendDtype, OpPolicy::kPromote,    OpPolicy::kBanned};

/// Every policy of the table by name, so that a difference can be printed.
std::vector<std::string> all_policies() {
  std::vector<std::string> policies;
  for (const auto& row : fastamp::op_table()) {
    policies.emplace_back(row.op + " " + std::string(fastamp::to_string(row.cpu)));
    policies.emplace_back(row.op + " " + std::string(fastamp::to_string(row.cuda)));
  }
  return policies;
}

}  // namespace

TEST_CASE("op_policy_from_string: reads what to_string writes", "[autocast][policy]") {
  for (const auto policy : kPolicies) {
    CHECK(fastamp::op_policy_from_string(fastamp::to_string(policy)) == policy);
  }
}

TEST_CASE("op_policy_from_string: names the policies there are", "[autocast][policy]") {
  const auto text = error_text<c10::ValueError>([] { fastamp::op_policy_from_string("fp16"); });
  CAPTURE(text);
  CHECK(text.find("got 'fp16'") != std::string::npos);
  for (const auto policy : kPolicies) {
    CHECK(text.find(fastamp::to_string(policy)) != std::string::npos);
  }
  CHECK_THROWS_AS(fastamp::op_policy_from_string(""), c10::ValueError);
  CHECK_THROWS_AS(fastamp::op_policy_from_string("Lower"), c10::ValueError);
}

TEST_CASE_METHOD(LeavesNoTrace, "op_table: every row names an op of torch, once",
                 "[autocast][policy]") {
  std::set<std::string> seen;
  for (const auto& row : fastamp::op_table()) {
    CAPTURE(row.op);
    CHECK(seen.insert(row.op).second);
    const auto dot = row.op.find('.');
    const auto overload = dot == std::string::npos ? "" : row.op.substr(dot + 1);
    const auto op =
        c10::Dispatcher::singleton().findSchema({"aten::" + row.op.substr(0, dot), overload});
    CHECK(op.has_value());
  }
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "op_table: by default acts on the ops that torch autocasts here, no others",
                 "[autocast][policy]") {
  const auto torch_autocasts = [](c10::DispatchKey key) {
    const TorchKernels kernels;
    std::set<std::string> ops;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (op.has_value() && name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(key)) {
        ops.insert(c10::toString(name).substr(6));
      }
    }
    return ops;
  };
  std::set<std::string> cpu;
  std::set<std::string> cuda;
  for (const auto& row : fastamp::op_table()) {
    if (row.cpu_default != OpPolicy::kPass) {
      cpu.insert(row.op);
    }
    if (row.cuda_default != OpPolicy::kPass) {
      cuda.insert(row.op);
    }
  }
  CHECK(cpu.size() > 100);
  CHECK(cpu == torch_autocasts(c10::DispatchKey::AutocastCPU));
  CHECK(cuda == torch_autocasts(c10::DispatchKey::AutocastCUDA));
}

TEST_CASE_METHOD(LeavesNoTrace, "op_policy: finds an op with and without namespace and overload",
                 "[autocast][policy]") {
  CHECK(fastamp::op_policy("mm", c10::kCPU) == OpPolicy::kLower);
  CHECK(fastamp::op_policy("aten::mm", c10::kCUDA) == OpPolicy::kLower);
  CHECK(fastamp::op_policy("softmax.int", c10::kCUDA) == OpPolicy::kSetOptDtype);
  CHECK(fastamp::op_policy("aten::softmax.int", c10::kCPU) == OpPolicy::kPass);
  CHECK(fastamp::op_policy("softmax", c10::kCUDA) == OpPolicy::kSetOptDtype);
  CHECK(fastamp::op_policy("binary_cross_entropy", c10::kCUDA) == OpPolicy::kBanned);
  CHECK(fastamp::op_policy("binary_cross_entropy", c10::kCPU) == OpPolicy::kFp32);
  CHECK(fastamp::op_policy("norm.Scalar", c10::kCUDA) == OpPolicy::kAppendDtype);
  CHECK(fastamp::op_policy("cat", c10::kCPU) == OpPolicy::kPromote);
}

TEST_CASE_METHOD(LeavesNoTrace, "op_policy: an unknown op is refused with the nearest names",
                 "[autocast][policy]") {
  const auto text = error_text<c10::ValueError>([] { fastamp::op_policy("lineer", c10::kCPU); });
  CAPTURE(text);
  CHECK(text.find("op_policy:") != std::string::npos);
  CHECK(text.find("got 'lineer'") != std::string::npos);
  CHECK(text.find("linear") != std::string::npos);
  for (const char* name : {"", "aten::", "aten::aten::mm", "mm.out", "softmax.", ".int", "MM"}) {
    CAPTURE(name);
    CHECK_THROWS_AS(fastamp::op_policy(name, c10::kCPU), c10::ValueError);
    CHECK_THROWS_AS(fastamp::set_op_policy(name, OpPolicy::kFp32), c10::ValueError);
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "op_policy: a device without a column is refused",
                 "[autocast][policy]") {
  const auto before = all_policies();
  const auto text = error_text<c10::ValueError>([] { fastamp::op_policy("mm", c10::kMPS); });
  CAPTURE(text);
  CHECK(text.find("expected device to be cpu or cuda, got mps") != std::string::npos);
  CHECK_THROWS_AS(fastamp::set_op_policy("mm", OpPolicy::kFp32, c10::kMeta), c10::ValueError);
  CHECK(all_policies() == before);
}

TEST_CASE_METHOD(LeavesNoTrace, "op_policy: a name whose overloads differ is refused",
                 "[autocast][policy]") {
  fastamp::set_op_policy("pow.Scalar", OpPolicy::kLower, c10::kCUDA);
  const auto text = error_text<c10::ValueError>([] { fastamp::op_policy("pow", c10::kCUDA); });
  CAPTURE(text);
  CHECK(text.find("overloads differ") != std::string::npos);
  CHECK(text.find("such as 'pow.") != std::string::npos);
  CHECK(fastamp::op_policy("pow", c10::kCPU) == OpPolicy::kPass);
  fastamp::reset_op_policies();
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "set_op_policy: changes the columns and overloads it names, no others",
                 "[autocast][policy]") {
  const auto before = fastamp::op_table();
  const auto changed = [&] {
    std::vector<std::string> names;
    const auto now = fastamp::op_table();
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (now[i].cpu != before[i].cpu) {
        names.push_back(now[i].op + " cpu");
      }
      if (now[i].cuda != before[i].cuda) {
        names.push_back(now[i].op + " cuda");
      }
      CHECK(now[i].cpu_default == before[i].cpu_default);
      CHECK(now[i].cuda_default == before[i].cuda_default);
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  using Names = std::vector<std::string>;
  SECTION("one device") {
    fastamp::set_op_policy("mm", OpPolicy::kFp32, c10::kCPU);
    CHECK(changed() == Names{"mm cpu"});
  }
  SECTION("both devices") {
    fastamp::set_op_policy("mm", OpPolicy::kFp32);
    CHECK(changed() == Names{"mm cpu", "mm cuda"});
  }
  SECTION("one overload") {
    fastamp::set_op_policy("aten::softmax.int", OpPolicy::kFp32, c10::kCUDA);
    CHECK(changed() == Names{"softmax.int cuda"});
  }
  SECTION("all overloads") {
    fastamp::set_op_policy("pow", OpPolicy::kLower);
    CHECK(changed() == Names{"pow.Scalar cpu", "pow.Scalar cuda", "pow.Tensor_Scalar cpu",
                             "pow.Tensor_Scalar cuda", "pow.Tensor_Tensor cpu",
                             "pow.Tensor_Tensor cuda"});
  }
  fastamp::reset_op_policies();
  CHECK(changed().empty());
}

TEST_CASE_METHOD(LeavesNoTrace, "set_op_policy: a policy that the op cannot carry changes nothing",
                 "[autocast][policy]") {
  const auto before = all_policies();
  const auto refused = [&](const char* op, OpPolicy policy) {
    const auto text = error_text<c10::ValueError>([&] { fastamp::set_op_policy(op, policy); });
    CAPTURE(op, text);
    CHECK(text.find("set_op_policy") != std::string::npos);
    CHECK(text.find("got '" + std::string(fastamp::to_string(policy))) != std::string::npos);
    CHECK(all_policies() == before);
  };
  refused("mm", OpPolicy::kSetOptDtype);
  refused("mm", OpPolicy::kAppendDtype);
  refused("softmax.int", OpPolicy::kAppendDtype);
  refused("norm.Scalar", OpPolicy::kSetOptDtype);
  refused("_cudnn_rnn", OpPolicy::kFp32);
  refused("_cudnn_rnn", OpPolicy::kPromote);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "set_op_policy: refuses all overloads of a name if one cannot carry the policy",
                 "[autocast][policy]") {
  const auto before = all_policies();
  // norm.Scalar and its neighbours have an overload with a dtype; find a name of the table with
  // mixed capabilities by trying them all, so that the test keeps its sense when the table grows.
  std::set<std::string> names;
  for (const auto& row : fastamp::op_table()) {
    names.insert(row.op.substr(0, row.op.find('.')));
  }
  int refusals = 0;
  for (const auto& name : names) {
    for (const auto policy : kPolicies) {
      try {
        fastamp::set_op_policy(name, policy);
        fastamp::reset_op_policies();
      } catch (const c10::ValueError&) {
        ++refusals;
        CAPTURE(name, fastamp::to_string(policy));
        CHECK(all_policies() == before);
      }
    }
  }
  CHECK(refusals > 100);
}
