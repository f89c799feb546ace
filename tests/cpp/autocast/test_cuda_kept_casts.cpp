// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

using fastamp::AutocastGuard;
using fastamp::KeepCastsGuard;
using fastamp::kept_casts;
using namespace fastamp::test;

namespace {

float sum_in_region(const at::Tensor& weight) {
  const AutocastGuard region(c10::kCUDA, c10::kHalf);
  return at::mm(at::ones({1, 64}, c10::kCUDA), weight).select(1, 0).item<float>();
}

at::Tensor cuda_weight() { return at::ones({64, 64}, c10::kCUDA).requires_grad_(); }

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard on CUDA: a copy per stream, edits are seen on all",
                 "[autocast][kept][cuda]") {
  const auto weight = cuda_weight();
  const KeepCastsGuard keep({weight});
  CHECK(sum_in_region(weight) == 64);
  const auto side = c10::cuda::getStreamFromPool();
  {
    const c10::cuda::CUDAStreamGuard on_side(side);
    CHECK(sum_in_region(weight) == 64);
    CHECK(kept_casts().copies == 2);
  }
  {
    const at::NoGradGuard no_grad;
    weight.fill_(2);
  }
  CHECK(sum_in_region(weight) == 128);
  CHECK(kept_casts().copies == 1);  // the other stream's was out of date
}

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard on CUDA: a captured graph casts at each replay",
                 "[autocast][kept][cuda][graph]") {
  const auto weight = cuda_weight();
  const auto x = at::ones({1, 64}, c10::kCUDA);
  const KeepCastsGuard keep({weight});
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAStreamGuard on_side(c10::cuda::getStreamFromPool());
  CHECK(sum_in_region(weight) == 64);
  at::cuda::CUDAGraph graph;
  at::Tensor out;
  graph.capture_begin();
  {
    const AutocastGuard region(c10::kCUDA, c10::kHalf);
    out = at::mm(x, weight);
  }
  graph.capture_end();
  weight.fill_(3);
  graph.replay();
  CHECK(out.select(1, 0).item<float>() == 192);
  CHECK(sum_in_region(weight) == 192);
}
