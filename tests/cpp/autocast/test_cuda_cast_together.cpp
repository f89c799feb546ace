// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/guard.h>

#include <ATen/ops/eye.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>

#include <cstdint>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::CastTogetherGuard;
using namespace fastamp::test;

TEST_CASE_METHOD(LeavesNoTrace, "CastTogetherGuard: the one launch has the bits of separate casts",
                 "[autocast][together][cuda]") {
  const auto dtype = GENERATE(c10::kBFloat16, c10::kHalf);
  std::vector<at::Tensor> weights;
  // Whole and broken vectors, one and many chunks, and one that lies off a 16-byte boundary.
  for (const std::int64_t columns : {1, 7, 8, 9, 255, 2048, 2049, 5000}) {
    weights.push_back(at::randn({3, columns}, at::kCUDA).mul_(1e4).requires_grad_());
  }
  auto shifted = at::randn({16}, at::kCUDA);
  at::Tensor odd = at::randn({3, 5}, at::kCUDA);
  odd.set_data(shifted.narrow(0, 1, 15).view({3, 5}));
  weights.push_back(odd.requires_grad_());
  const CastTogetherGuard together(weights);
  const auto identity = at::eye(3, at::TensorOptions(at::kCUDA).dtype(dtype));
  for (int repeat = 0; repeat < 2; ++repeat) {
    const AutocastGuard region(c10::kCUDA, dtype);
    for (const auto& weight : weights) {
      const auto got = at::mm(identity, weight);
      CHECK(bit_equal(got.detach(), at::mm(identity, weight.detach().to(dtype))));
    }
  }
}
