// SPDX-License-Identifier: Apache-2.0
// Casts to fp8 on a GPU: the bits of the CPU kernel.

#include "float8/float8_cast.h"
#include "support/catch.h"

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

namespace {

using fastamp::autocast::cast_all_to_float8;
using fastamp::autocast::cast_to_float8;
using fastamp::autocast::Float8Cast;
using fastamp::autocast::Float8CastRequest;

constexpr fastamp::autocast::Float8Wanted kAll{.rows = true, .columns = true, .column_sums = true};
constexpr c10::ScalarType kInputs[] = {c10::kFloat, c10::kBFloat16, c10::kHalf};
constexpr c10::ScalarType kFormats[] = {c10::kFloat8_e4m3fn, c10::kFloat8_e5m2};

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.cpu().view(c10::kByte).equal(b.cpu().view(c10::kByte));
}

/// Sums that are NaN may differ in their bits: the processors choose those.
bool same_sums(const at::Tensor& a, const at::Tensor& b) {
  return same_bytes(a.cpu().nan_to_num(7.0), b.cpu().nan_to_num(7.0)) &&
         a.cpu().isnan().equal(b.cpu().isnan());
}

void check_same(const Float8Cast& got, const Float8Cast& expected) {
  CHECK(same_bytes(got.rows, expected.rows));
  CHECK(same_bytes(got.columns, expected.columns));
  CHECK(got.inverse_scale.cpu().equal(expected.inverse_scale));
  CHECK(same_sums(got.column_sums, expected.column_sums));
}

void check_matrix(const at::Tensor& x) {
  for (const auto to : kFormats) {
    CAPTURE(x.sizes(), x.scalar_type(), to);
    check_same(cast_to_float8(x.to(c10::kCUDA), to, kAll), cast_to_float8(x, to, kAll));
  }
}

at::Tensor wide_range(at::IntArrayRef sizes) {
  return at::randn(sizes) * (at::randn(sizes) * 4).clamp_max(7).exp();
}

}  // namespace

TEST_CASE("cast_to_float8 on a GPU: every size and dtype", "[float8][cuda]") {
  at::manual_seed(0);
  for (const auto from : kInputs) {
    for (const std::int64_t rows : {1, 15, 16, 17, 63, 64, 65, 197, 3000}) {
      for (const std::int64_t columns : {1, 16, 17, 24, 128, 136, 1600}) {
        check_matrix(wide_range({rows, columns}).to(from));
      }
    }
  }
}

TEST_CASE("cast_to_float8 on a GPU: every value of the 16-bit dtypes", "[float8][cuda]") {
  const auto bits = at::arange(-32768, 32768, at::dtype(c10::kShort));
  for (const auto values : {c10::kBFloat16, c10::kHalf}) {
    for (const double limit : {0x1p-120, 0x1p-10, 1.0, 65504.0, 3.4e38}) {
      const auto all = bits.view(values).to(c10::kFloat);
      const auto within = all.masked_fill(all.abs().le(limit).logical_not(), 0).view({256, 256});
      check_matrix(within);
      check_matrix(within.to(values));
    }
    check_matrix(bits.view(values).view({256, 256}));  // inf and NaN among them
  }
}

TEST_CASE("cast_to_float8 on a GPU: off 16-byte boundaries, and views", "[float8][cuda]") {
  at::manual_seed(1);
  for (const auto from : kInputs) {
    const auto base = wide_range({33 * 48 + 9}).to(from);
    const auto on_gpu = base.to(c10::kCUDA);
    for (std::int64_t skew = 1; skew < 9; ++skew) {
      const auto piece = [&](const at::Tensor& all) {
        return all.narrow(0, skew, std::int64_t{33} * 48).view({33, 48});
      };
      check_same(cast_to_float8(piece(on_gpu), c10::kFloat8_e4m3fn, kAll),
                 cast_to_float8(piece(base), c10::kFloat8_e4m3fn, kAll));
      check_same(cast_to_float8(piece(on_gpu).t(), c10::kFloat8_e5m2, kAll),
                 cast_to_float8(piece(base).t(), c10::kFloat8_e5m2, kAll));
    }
  }
}

TEST_CASE("cast_to_float8 on a GPU: a graph finds the scale of what is there",
          "[float8][cuda][graph]") {
  at::manual_seed(2);
  const auto x = at::randn({200, 64}, at::kCUDA);
  const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromPool());
  cast_to_float8(x, c10::kFloat8_e4m3fn, kAll);
  c10::cuda::getCurrentCUDAStream().synchronize();
  at::cuda::CUDAGraph graph;
  Float8Cast cast;
  graph.capture_begin();
  cast = cast_to_float8(x, c10::kFloat8_e4m3fn, kAll);
  graph.capture_end();
  for (int repeat = 0; repeat < 3; ++repeat) {
    x.mul_(0.3);
    graph.replay();
    check_same(cast, cast_to_float8(x.cpu(), c10::kFloat8_e4m3fn, kAll));
  }
}

TEST_CASE("cast_all_to_float8 on a GPU: by one pair of launches, the CPU's bits",
          "[float8][cuda]") {
  at::manual_seed(3);
  std::vector<Float8CastRequest> on_cpu;
  std::vector<Float8CastRequest> on_gpu;
  for (std::int64_t i = 0; i < 300; ++i) {  // More than fit a kernel's arguments.
    auto matrix = wide_range({1 + i * 7 % 130, 16 * (1 + i % 9)}).to(kInputs[i % 3]);
    matrix = i % 5 == 0 ? matrix.t() : matrix;
    const fastamp::autocast::Float8Wanted wanted{
        .rows = i % 4 != 1, .columns = i % 4 != 2, .column_sums = i % 50 == 3};
    on_cpu.push_back({matrix, wanted});
    on_gpu.push_back({matrix.to(c10::kCUDA), wanted});
  }
  const auto got = cast_all_to_float8(on_gpu, c10::kFloat8_e4m3fn);
  const auto expected = cast_all_to_float8(on_cpu, c10::kFloat8_e4m3fn);
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return a.defined() == b.defined() && (!a.defined() || same_bytes(a, b));
    };
    CHECK(same(got[i].rows, expected[i].rows));
    CHECK(same(got[i].columns, expected[i].columns));
    CHECK(same(got[i].column_sums, expected[i].column_sums));
    CHECK(got[i].inverse_scale.cpu().equal(expected[i].inverse_scale));
  }
}
