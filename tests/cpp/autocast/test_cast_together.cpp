// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/trace.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>

#include <cstddef>
#include <cstdint>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::CastTogetherGuard;
using namespace fastamp::test;

namespace {

/// Casts made by the use of each weight, in a region of their own.
std::vector<std::uint64_t> casts_by_use(const std::vector<at::Tensor>& weights) {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  std::vector<std::uint64_t> casts;
  for (const auto& weight : weights) {
    const fastamp::Trace trace;
    column_sums(weight);
    casts.push_back(trace.totals().weight_casts);
  }
  return casts;
}

using Casts = std::vector<std::uint64_t>;

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "CastTogetherGuard: the first use casts what the last region used",
                 "[autocast][together]") {
  const std::vector weights{make_weight(4, 2), make_weight(3, 3), make_weight(1, 5)};
  CastTogetherGuard together(weights);
  CHECK(casts_by_use(weights) == Casts{1, 1, 1});
  CHECK(casts_by_use(weights) == Casts{3, 0, 0});
  CHECK(casts_by_use({weights[0]}) == Casts{3});
  CHECK(casts_by_use(weights) == Casts{1, 1, 1});
  together.release();
  together.release();
  CHECK(casts_by_use(weights) == Casts{1, 1, 1});
}

TEST_CASE_METHOD(LeavesNoTrace, "CastTogetherGuard: values are those of now, gradients arrive",
                 "[autocast][together]") {
  const std::vector weights{make_weight(4, 2), make_weight(4, 2)};
  const CastTogetherGuard together(weights);
  casts_by_use(weights);
  {
    const at::NoGradGuard no_grad;
    weights[1].fill_(3);
  }
  at::Tensor out;
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    out = at::add(column_sums(weights[0]), column_sums(weights[1]));
  }
  CHECK(out.select(1, 0).item<float>() == 16);
  out.sum().backward();
  CHECK(weights[0].grad().sum().item<float>() == 8);
  CHECK(weights[1].grad().sum().item<float>() == 8);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "CastTogetherGuard: alternating models keep their plans, up to eight",
                 "[autocast][together]") {
  std::vector<std::vector<at::Tensor>> models;
  std::vector<at::Tensor> all;
  for (int i = 0; i < 9; ++i) {
    models.push_back({make_weight(2, 2), make_weight(2, 2)});
    all.insert(all.end(), models.back().begin(), models.back().end());
  }
  const CastTogetherGuard together(all);
  for (std::size_t i = 0; i < 8; ++i) {
    casts_by_use(models[i]);
  }
  CHECK(casts_by_use(models[0]) == Casts{2, 0});
  CHECK(casts_by_use(models[8]) == Casts{1, 1});  // now the oldest plan, models[1]'s, is gone
  CHECK(casts_by_use(models[1]) == Casts{1, 1});
  CHECK(casts_by_use(models[0]) == Casts{2, 0});
}
