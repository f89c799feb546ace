// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/registration.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <map>
#include <string>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

/// What the dispatcher says about every aten op, by name.
std::map<std::string, std::string> dispatcher_dump() {
  std::map<std::string, std::string> dump;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (const auto op = dispatcher.findSchema(name);
        op.has_value() && name.name.rfind("aten::", 0) == 0) {
      dump[c10::toString(name)] = op->dumpState();
    }
  }
  return dump;
}

std::size_t count_differences(const std::map<std::string, std::string>& a,
                              const std::map<std::string, std::string>& b) {
  std::size_t differences = 0;
  for (const auto& [name, state] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second != state) {
      UNSCOPED_INFO(name);
      ++differences;
    }
  }
  return differences;
}

at::Tensor users_mm(const at::Tensor& a, const at::Tensor& /*b*/) { return a.clone(); }

}  // namespace

TEST_CASE_METHOD(
    LeavesNoTrace,
    "unregister_kernels: gives back exactly torch's kernels, register_kernels fastamp's",
    "[autocast][registration]") {
  fastamp::unregister_kernels();
  CHECK_FALSE(fastamp::kernels_registered());
  const auto torch = dispatcher_dump();
  REQUIRE(torch.size() > 2000);
  fastamp::register_kernels();
  CHECK(fastamp::kernels_registered());
  const auto own = dispatcher_dump();
  std::size_t acting =
      1;  // The layer of a CPU's TransformerEncoder, which is in no list of torch's.
  for (const auto& row : fastamp::op_table()) {
    acting += row.cpu != fastamp::OpPolicy::kPass || row.cuda != fastamp::OpPolicy::kPass ? 1 : 0;
  }
  CHECK(count_differences(torch, own) == acting);
  fastamp::unregister_kernels();
  CHECK(count_differences(torch, dispatcher_dump()) == 0);
  fastamp::register_kernels();
  CHECK(count_differences(own, dispatcher_dump()) == 0);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "unregister_kernels: also takes back kernels of ops that torch does not autocast",
                 "[autocast][registration]") {
  fastamp::unregister_kernels();
  const auto torch = dispatcher_dump();
  fastamp::register_kernels();
  fastamp::set_op_policy("layer_norm", fastamp::OpPolicy::kLower, c10::kCPU);
  fastamp::unregister_kernels();
  CHECK(count_differences(torch, dispatcher_dump()) == 0);
  fastamp::reset_op_policies();
  fastamp::register_kernels();
}

TEST_CASE_METHOD(LeavesNoTrace, "register_kernels and unregister_kernels: once is as good as twice",
                 "[autocast][registration]") {
  const auto own = dispatcher_dump();
  fastamp::register_kernels();
  fastamp::register_kernels();
  CHECK(count_differences(own, dispatcher_dump()) == 0);
  fastamp::unregister_kernels();
  fastamp::unregister_kernels();
  CHECK_FALSE(fastamp::kernels_registered());
  fastamp::register_kernels();
}

TEST_CASE_METHOD(LeavesNoTrace, "unregister_kernels: refuses inside a region and changes nothing",
                 "[autocast][registration]") {
  const auto refused = [] {
    const auto before = public_state();
    const auto text = error_text<c10::Error>([] { fastamp::unregister_kernels(); });
    CAPTURE(text);
    CHECK(text.find("unregister_kernels: expected to be called outside autocast regions") !=
          std::string::npos);
    CHECK(fastamp::kernels_registered());
    CHECK(public_state() == before);
  };
  SECTION("a guard") {
    const AutocastGuard region(c10::kCPU);
    refused();
  }
  SECTION("a disabled guard") {
    const AutocastGuard region(c10::kCPU, std::nullopt, false);
    refused();
  }
  SECTION("a region written by hand") {
    const HandRegion region(c10::kCUDA, c10::kHalf);
    refused();
  }
  SECTION("autocast switched on without a region") {
    set_enabled(c10::kCPU, true);
    refused();
    set_enabled(c10::kCPU, false);
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: installs fastamp's kernels",
                 "[autocast][registration]") {
  fastamp::unregister_kernels();
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(fastamp::kernels_registered());
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "register_kernels: a kernel that the user registers later wins, and can go again",
                 "[autocast][registration]") {
  const auto x = at::ones({2, 2});
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  {
    const CapturedWarnings warnings;  // torch may say that the user's kernel goes over fastamp's
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCPU, __FILE__,
                           __LINE__);
    library.impl("mm", TORCH_FN(users_mm));
    CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
  }
  CHECK(at::mm(x, x).scalar_type() == c10::kBFloat16);
}
