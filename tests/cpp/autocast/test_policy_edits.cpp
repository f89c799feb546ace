// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>

#include <ATen/ops/addmm.h>
#include <ATen/ops/atan2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>

using fastamp::AutocastGuard;
using fastamp::OpPolicy;
using fastamp::set_op_policy;
using namespace fastamp::test;

namespace {

/// A test that edits policies: they are reset at its end, also when an assertion fails.
struct EditsPolicies : LeavesNoTrace {
  EditsPolicies() = default;
  EditsPolicies(const EditsPolicies&) = delete;
  EditsPolicies& operator=(const EditsPolicies&) = delete;
  ~EditsPolicies() { fastamp::reset_op_policies(); }

  at::Tensor x = at::ones({4, 4});
  at::Tensor low = at::ones({4, 4}, c10::kBFloat16);
};

}  // namespace

TEST_CASE_METHOD(EditsPolicies,
                 "set_op_policy: acts from the next call on, inside an open region too",
                 "[autocast][policy]") {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::mm(x, x).scalar_type() == c10::kBFloat16);
  set_op_policy("mm", OpPolicy::kFp32);
  CHECK(at::mm(low, low).scalar_type() == c10::kFloat);
  set_op_policy("mm", OpPolicy::kPass);
  CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
  CHECK(at::mm(low, low).scalar_type() == c10::kBFloat16);
  fastamp::reset_op_policies();
  CHECK(at::mm(x, x).scalar_type() == c10::kBFloat16);
}

TEST_CASE_METHOD(EditsPolicies, "set_op_policy: an edit of the CUDA column does not touch the CPU",
                 "[autocast][policy]") {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  set_op_policy("mm", OpPolicy::kFp32, c10::kCUDA);
  CHECK(at::mm(x, x).scalar_type() == c10::kBFloat16);
}

TEST_CASE_METHOD(EditsPolicies,
                 "set_op_policy: an op that torch does not autocast can be given a policy",
                 "[autocast][policy]") {
  const auto weight = at::randn({4}).requires_grad_();
  SECTION("lower") {
    set_op_policy("layer_norm", OpPolicy::kLower, c10::kCPU);
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    const auto y = at::layer_norm(x, {4}, weight);
    CHECK(y.scalar_type() == c10::kBFloat16);
    CHECK(bit_equal(y, [&] {
      const AutocastGuard off(c10::kCPU, std::nullopt, false);
      return at::layer_norm(low, {4}, weight.to(c10::kBFloat16));
    }()));
    y.sum().backward();
    CHECK(weight.grad().scalar_type() == c10::kFloat);
  }
  SECTION("fp32") {
    set_op_policy("layer_norm", OpPolicy::kFp32, c10::kCPU);
    set_op_policy("rms_norm", OpPolicy::kFp32, c10::kCPU);
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    CHECK(at::layer_norm(low, {4}, weight).scalar_type() == c10::kFloat);
    CHECK(at::rms_norm(low, {4}).scalar_type() == c10::kFloat);
  }
  SECTION("inside an open region") {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    CHECK(at::softmax(low, 1).scalar_type() == c10::kBFloat16);
    set_op_policy("softmax", OpPolicy::kSetOptDtype, c10::kCPU);
    CHECK(at::softmax(low, 1).scalar_type() == c10::kFloat);
    CHECK(at::softmax(low, 1, c10::kHalf).scalar_type() == c10::kHalf);
    fastamp::reset_op_policies();
    CHECK(at::softmax(low, 1).scalar_type() == c10::kBFloat16);
  }
}

TEST_CASE_METHOD(EditsPolicies, "set_op_policy: the first edit of such an op prints no warning",
                 "[autocast][policy]") {
  const CapturedWarnings warnings;
  set_op_policy("native_layer_norm", OpPolicy::kLower, c10::kCPU);
  CHECK(warnings.texts().empty());
}

TEST_CASE_METHOD(EditsPolicies,
                 "policy set_opt_dtype: sets an absent dtype, leaves the arguments alone",
                 "[autocast][policy]") {
  set_op_policy("sum.*", OpPolicy::kSetOptDtype, c10::kCPU);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::sum(low).scalar_type() == c10::kFloat);
  CHECK(at::sum(low, 0).scalar_type() == c10::kFloat);
  CHECK(at::sum(low, c10::kBFloat16).scalar_type() == c10::kBFloat16);
  CHECK(at::sum(x.to(c10::kDouble)).scalar_type() == c10::kDouble);
  CHECK(at::sum(x.to(c10::kLong)).scalar_type() == c10::kLong);
}

TEST_CASE_METHOD(EditsPolicies, "policy append_dtype: calls the overload with an output dtype",
                 "[autocast][policy]") {
  set_op_policy("norm", OpPolicy::kAppendDtype, c10::kCPU);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::norm(low, 2).scalar_type() == c10::kFloat);
  CHECK(at::norm(low, 2, at::IntArrayRef{0}, false).scalar_type() == c10::kFloat);
  CHECK(at::norm(x.to(c10::kDouble), 2).scalar_type() == c10::kDouble);
  CHECK(at::norm(low, 2).item<float>() == 4.0F);
}

TEST_CASE_METHOD(EditsPolicies,
                 "policy promote: widest of the arguments, float32 for a mix of lower dtypes",
                 "[autocast][policy]") {
  set_op_policy("atan2", OpPolicy::kPromote, c10::kCPU);
  const auto half = at::ones({4, 4}, c10::kHalf);
  const auto fp64 = at::ones({4, 4}, c10::kDouble);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::atan2(low, low).scalar_type() == c10::kBFloat16);
  CHECK(at::atan2(low, x).scalar_type() == c10::kFloat);
  CHECK(at::atan2(x, low).scalar_type() == c10::kFloat);
  CHECK(at::atan2(low, half).scalar_type() == c10::kFloat);
  CHECK(at::atan2(half, half).scalar_type() == c10::kFloat);
  // Doubles are never cast and do not count.
  CHECK(at::atan2(fp64, fp64).scalar_type() == c10::kDouble);
  CHECK(at::cat({low, half, x}).scalar_type() == c10::kFloat);
  CHECK(at::cat({low}).scalar_type() == c10::kBFloat16);
}

TEST_CASE_METHOD(EditsPolicies, "policy banned: refuses the op inside a region only",
                 "[autocast][policy]") {
  set_op_policy("mm", OpPolicy::kBanned, c10::kCPU);
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    const auto text = error_text<c10::Error>([&] { at::mm(x, x); });
    CAPTURE(text);
    CHECK(text.find("aten::mm: not allowed under autocast on cpu") != std::string::npos);
    CHECK(text.find("enabled=False") != std::string::npos);
    // The refused call leaves the region as it was.
    CHECK(public_state().cpu_enabled);
    CHECK(at::addmm(x, x, x).scalar_type() == c10::kBFloat16);
    const AutocastGuard off(c10::kCPU, std::nullopt, false);
    CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
  }
  CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
}

TEST_CASE_METHOD(EditsPolicies,
                 "set_op_policy: edits last over unregister_kernels and register_kernels",
                 "[autocast][policy]") {
  set_op_policy("layer_norm", OpPolicy::kLower, c10::kCPU);
  {
    const TorchKernels torch;
    const HandRegion region(c10::kCPU, c10::kBFloat16);
    CHECK(at::layer_norm(x, {4}).scalar_type() == c10::kFloat);
  }
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::layer_norm(x, {4}).scalar_type() == c10::kBFloat16);
}

TEST_CASE_METHOD(EditsPolicies, "set_op_policy: may be called while torch's kernels are in place",
                 "[autocast][policy]") {
  {
    const TorchKernels torch;
    set_op_policy("layer_norm", OpPolicy::kLower, c10::kCPU);
    const HandRegion region(c10::kCPU, c10::kBFloat16);
    CHECK(at::layer_norm(x, {4}).scalar_type() == c10::kFloat);
  }
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::layer_norm(x, {4}).scalar_type() == c10::kBFloat16);
}
