// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

at::Tensor cuda_weight() { return at::ones({64, 64}, c10::kCUDA).requires_grad_(); }

NodePointer cast_of(const at::Tensor& weight) {
  return node_of_argument(at::mm(at::ones({1, 64}, c10::kCUDA), weight), 1);
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "cast cache on CUDA: a weight is cast once per region",
                 "[autocast][cache][cuda]") {
  const auto w = cuda_weight();
  const AutocastGuard region(c10::kCUDA, c10::kHalf);
  CHECK(cast_of(w) == cast_of(w));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache on CUDA: work on another stream gets casts of its own",
                 "[autocast][cache][cuda]") {
  const auto w = cuda_weight();
  const AutocastGuard region(c10::kCUDA, c10::kHalf);
  const auto here = cast_of(w);
  const auto side = c10::cuda::getStreamFromPool();
  {
    const c10::cuda::CUDAStreamGuard on_side(side);
    CHECK(cast_of(w) != here);
    CHECK(cast_of(w) == cast_of(w));
  }
  CHECK(cast_of(w) == cast_of(w));
  side.synchronize();
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache on CUDA: a captured graph casts for itself, and follows the weight",
                 "[autocast][cache][cuda][graph]") {
  const auto w = cuda_weight();
  const auto x = at::ones({1, 64}, c10::kCUDA);
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAStreamGuard on_side(c10::cuda::getStreamFromPool());
  at::cuda::CUDAGraph graph;
  at::Tensor y;
  {
    const AutocastGuard region(c10::kCUDA, c10::kHalf);
    at::mm(x, w);  // a cast made outside the capture, in the same region and stream
    c10::cuda::getCurrentCUDAStream().synchronize();
    graph.capture_begin();
    y = at::mm(x, w);
    graph.capture_end();
    // A cast in the graph's memory holds nothing yet: it must not be used outside.
    CHECK(at::mm(x, w).select(1, 0).item<float>() == 64.0F);
  }
  w.add_(1);
  graph.replay();
  CHECK(y.select(1, 0).item<float>() == 128.0F);
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache on CUDA: weights of one region may lie on CPU and CUDA",
                 "[autocast][cache][cuda]") {
  const auto on_cpu = make_weight(64, 64);
  const auto w = cuda_weight();
  const AutocastGuard cpu(c10::kCPU, c10::kBFloat16);
  const AutocastGuard cuda(c10::kCUDA, c10::kHalf);
  CHECK(cast_of(w) == cast_of(w));
  CHECK(is_cast_kept(on_cpu));
}
