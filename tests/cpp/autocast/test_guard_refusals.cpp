// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>

#include <ATen/Context.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

using fastamp::AutocastGuard;
using namespace fastamp::test;

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: refuses a device that torch has no autocast for",
                 "[autocast][guard]") {
  const auto device = GENERATE(c10::DeviceType::Meta, c10::DeviceType::FPGA);
  const auto before = public_state();
  const auto text = error_text<c10::Error>([&] { const AutocastGuard region(device); });
  CAPTURE(text);
  CHECK(text.find("AutocastGuard: expected device to be one torch has autocast for") !=
        std::string::npos);
  CHECK(text.find(c10::DeviceTypeName(device, true)) != std::string::npos);
  CHECK(public_state() == before);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: an unsupported dtype warns and disables the region",
                 "[autocast][guard]") {
  const auto dtype = GENERATE(c10::kFloat, c10::kDouble, c10::kInt);
  const auto x = at::ones({2, 2});
  {
    const CapturedWarnings warnings;
    const AutocastGuard region(c10::kCPU, dtype);
    REQUIRE(warnings.texts().size() == 1);
    CHECK(warnings.has("AutocastGuard: expected dtype to be bfloat16 or float16 on cpu"));
    CHECK(warnings.has(c10::toString(dtype)));
    CHECK(warnings.has("disabled"));
    CHECK_FALSE(public_state().cpu_enabled);
    CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
    const AutocastGuard inner(c10::kCPU, c10::kHalf);
    CHECK(at::mm(x, x).scalar_type() == c10::kHalf);
  }
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: an unsupported dtype switches an outer region off inside",
                 "[autocast][guard]") {
  const auto x = at::ones({2, 2});
  const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
  {
    const CapturedWarnings warnings;
    const AutocastGuard region(c10::kCPU, c10::kFloat);
    CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
  }
  CHECK(at::mm(x, x).scalar_type() == c10::kBFloat16);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: a disabled region says nothing about its dtype or device",
                 "[autocast][guard]") {
  const CapturedWarnings warnings;
  const AutocastGuard cpu(c10::kCPU, c10::kFloat, false);
  const AutocastGuard cuda(c10::kCUDA, c10::kHalf, false);
  CHECK(warnings.texts().empty());
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: a CUDA region in a process without CUDA warns and is disabled",
                 "[autocast][guard]") {
  if (at::globalContext().hasCUDA()) {
    return;  // the CUDA tests cover such a process
  }
  const CapturedWarnings warnings;
  const AutocastGuard region(c10::kCUDA, c10::kHalf);
  REQUIRE(warnings.texts().size() == 1);
  CHECK(warnings.has("AutocastGuard: expected a process with CUDA for device cuda"));
  CHECK(warnings.has("disabled"));
  CHECK_FALSE(public_state().cuda_enabled);
  CHECK(public_state().depth == 1);
  const auto x = at::ones({2, 2});
  CHECK(at::mm(x, x).scalar_type() == c10::kFloat);
}
