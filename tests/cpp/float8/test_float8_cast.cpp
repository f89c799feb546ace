// SPDX-License-Identifier: Apache-2.0
// Casts of matrices to fp8: both layouts, against torch's ops.

#include "float8/float8_cast.h"
#include "support/catch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace {

using fastamp::autocast::cast_all_to_float8;
using fastamp::autocast::cast_to_float8;
using fastamp::autocast::cast_to_float8_by_ops;
using fastamp::autocast::Float8Cast;
using fastamp::autocast::Float8CastRequest;

constexpr fastamp::autocast::Float8Wanted kAll{.rows = true, .columns = true, .column_sums = true};

double max_of(c10::ScalarType dtype) { return dtype == c10::kFloat8_e4m3fn ? 448 : 57344; }

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.view(c10::kByte).equal(b.contiguous().view(c10::kByte));
}

/// What the cast is to be, with the scale that it chose.
void check_layouts(const at::Tensor& x, c10::ScalarType to, const Float8Cast& cast) {
  const double max = max_of(to);
  const at::Tensor scaled = x.to(c10::kFloat) / cast.inverse_scale;
  const at::Tensor expected = scaled.clamp(-max, max).to(to);
  const auto rows = x.size(0);
  const auto padded = (rows + 15) / 16 * 16;
  REQUIRE(same_bytes(cast.rows, expected));
  REQUIRE(cast.columns.sizes() == at::IntArrayRef({x.size(1), padded}));
  REQUIRE(cast.columns.is_contiguous());
  REQUIRE(same_bytes(cast.columns.narrow(1, 0, rows).contiguous(), expected.t()));
  REQUIRE_FALSE(
      cast.columns.narrow(1, rows, padded - rows).contiguous().view(c10::kByte).any().item<bool>());
  REQUIRE(cast.inverse_scale.dim() == 0);
  const auto amax = x.to(c10::kDouble).abs().max().item<double>();
  const double top = amax / cast.inverse_scale.item<double>();
  REQUIRE(top <= max);
  REQUIRE((top > max / 2 || amax == 0 || cast.inverse_scale.item<double>() == 0x1p-126));
}

void check_sums(const at::Tensor& x, const Float8Cast& cast) {
  const at::Tensor wide = x.to(c10::kDouble);
  const at::Tensor bound = wide.abs().sum(0) * 1e-6;
  REQUIRE(cast.column_sums.scalar_type() == c10::kFloat);
  REQUIRE((cast.column_sums.to(c10::kDouble) - wide.sum(0)).abs().le(bound).all().item<bool>());
}

constexpr c10::ScalarType kInputs[] = {c10::kFloat, c10::kBFloat16, c10::kHalf};
constexpr c10::ScalarType kFormats[] = {c10::kFloat8_e4m3fn, c10::kFloat8_e5m2};

template <class Check>
void for_all_pairs(const Check& check) {
  for (const auto from : kInputs) {
    for (const auto to : kFormats) {
      CAPTURE(from, to);
      check(from, to);
    }
  }
}

/// Every pattern of a 16-bit dtype with a magnitude up to `limit`, zeros for the others.
at::Tensor every_value(c10::ScalarType dtype, double limit) {
  const auto bits = at::arange(-32768, 32768, at::dtype(c10::kShort));
  const auto values = bits.view(dtype).to(c10::kFloat);
  const auto wanted = at::isfinite(values).logical_and(values.abs().le(limit));
  return at::where(wanted, values, at::zeros({})).to(dtype).view({256, 256});
}

at::Tensor wide_range(at::IntArrayRef sizes) {
  return at::randn(sizes) * (at::randn(sizes) * 4).clamp_max(7).exp();
}

}  // namespace

TEST_CASE("cast_to_float8: every value of the 16-bit dtypes, six dtype pairs", "[float8]") {
  for_all_pairs([](c10::ScalarType from, c10::ScalarType to) {
    for (const auto values : {c10::kBFloat16, c10::kHalf}) {
      for (const double limit : {0x1p-120, 0x1p-10, 1.0, 65504.0, 3.4e38}) {
        const auto x = every_value(values, limit).to(from);
        const auto finite = at::where(at::isfinite(x), x, at::zeros({}, x.options()));
        CAPTURE(values, limit);
        check_layouts(finite, to, cast_to_float8(finite, to, kAll));
      }
    }
  });
}

TEST_CASE("cast_to_float8: any number of rows and columns", "[float8]") {
  at::manual_seed(0);
  for_all_pairs([](c10::ScalarType from, c10::ScalarType to) {
    for (const std::int64_t rows : {1, 15, 16, 17, 197, 300}) {
      for (const std::int64_t columns : {1, 16, 63, 64, 65, 208}) {
        const auto x = wide_range({rows, columns}).to(from);
        CAPTURE(rows, columns);
        const auto cast = cast_to_float8(x, to, kAll);
        check_layouts(x, to, cast);
        check_sums(x, cast);
      }
    }
  });
}

TEST_CASE("cast_to_float8: views of any strides", "[float8]") {
  at::manual_seed(1);
  const auto base = wide_range({64, 96});
  for (const auto& view :
       {base.t(), base.slice(0, 3, 50), base.slice(1, 5, 60), base.slice(0, 0, 64, 2),
        base.slice(1, 0, 1).expand({64, 32}), base.t().slice(0, 0, 48).slice(1, 16, 48)}) {
    CAPTURE(view.sizes(), view.strides());
    for (const auto to : kFormats) {
      const auto cast = cast_to_float8(view, to, kAll);
      check_layouts(view.contiguous(), to, cast);
      check_sums(view.contiguous(), cast);
      const auto without_sums = cast_to_float8(view, to, {.rows = true, .columns = true});
      CHECK(same_bytes(without_sums.rows, cast.rows));
      CHECK(same_bytes(without_sums.columns, cast.columns));
    }
  }
}

TEST_CASE("cast_to_float8: only what is wanted is made", "[float8]") {
  const auto x = wide_range({17, 32});
  const auto rows = cast_to_float8(x, c10::kFloat8_e4m3fn, {.rows = true});
  CHECK(rows.rows.defined());
  CHECK_FALSE(rows.columns.defined());
  CHECK_FALSE(rows.column_sums.defined());
  const auto columns = cast_to_float8(x, c10::kFloat8_e4m3fn, {.columns = true});
  CHECK_FALSE(columns.rows.defined());
  CHECK(columns.columns.defined());
}

TEST_CASE("cast_to_float8: a power of two goes into the scale", "[float8]") {
  at::manual_seed(2);
  const auto x = at::randn({40, 48}).clamp_min(-3);
  for (const auto to : kFormats) {
    const auto cast = cast_to_float8(x, to, kAll);
    for (const int k : {-20, -1, 1, 30}) {
      const auto scaled = cast_to_float8(x * std::ldexp(1.0, k), to, kAll);
      CHECK(same_bytes(scaled.rows, cast.rows));
      CHECK(scaled.inverse_scale.item<float>() == std::ldexp(cast.inverse_scale.item<float>(), k));
    }
  }
}

TEST_CASE("cast_to_float8: zeros have scale 1", "[float8]") {
  for_all_pairs([](c10::ScalarType from, c10::ScalarType to) {
    const auto cast = cast_to_float8(at::zeros({3, 16}, from), to, kAll);
    CHECK(cast.inverse_scale.item<float>() == 1.0F);
    CHECK_FALSE(cast.rows.view(c10::kByte).any().item<bool>());
  });
}

TEST_CASE("cast_to_float8: inf and NaN stay where they are, and do not count for the scale",
          "[float8]") {
  at::manual_seed(3);
  for_all_pairs([](c10::ScalarType from, c10::ScalarType to) {
    const auto finite = at::randn({20, 32}).to(from);
    auto x = finite.clone();
    x[2][3] = std::numeric_limits<float>::infinity();
    x[5][6] = -std::numeric_limits<float>::infinity();
    x[7][9] = std::numeric_limits<float>::quiet_NaN();
    auto without = finite.clone();
    without.masked_fill_(at::isfinite(x).logical_not(), 0);
    const auto cast = cast_to_float8(x, to, kAll);
    const auto expected = cast_to_float8(without, to, kAll);
    CHECK(cast.inverse_scale.equal(expected.inverse_scale));
    const auto is_finite = at::isfinite(cast.rows.to(c10::kFloat));
    CHECK(is_finite.equal(at::isfinite(x)));
    CHECK(cast.rows.view(c10::kByte)
              .masked_select(is_finite)
              .equal(expected.rows.view(c10::kByte).masked_select(is_finite)));
    CHECK(cast.rows[2][3].to(c10::kFloat).isnan().item<bool>() == (to == c10::kFloat8_e4m3fn));
    CHECK(cast.rows[7][9].to(c10::kFloat).isnan().item<bool>());
  });
  const auto all_inf = at::zeros({2, 16}).add(std::numeric_limits<float>::infinity());
  CHECK(cast_to_float8(all_inf, c10::kFloat8_e5m2, kAll).inverse_scale.item<float>() == 1.0F);
}

TEST_CASE("cast_to_float8_by_ops: the same bytes as the kernel", "[float8]") {
  at::manual_seed(4);
  for_all_pairs([](c10::ScalarType from, c10::ScalarType to) {
    for (const double scale : {0.0, 1e-42, 1e-30, 1.0, 1e4, 1e36}) {
      auto x = (wide_range({33, 48}) * scale).to(from);
      x = at::where(at::isfinite(x), x, at::zeros({}, x.options()));
      for (const bool with_nan : {false, true}) {
        if (with_nan) {
          x[1][2] = std::numeric_limits<float>::quiet_NaN();
          x[3][4] = std::numeric_limits<float>::infinity();
        }
        CAPTURE(scale, with_nan);
        const auto by_kernel = cast_to_float8(x, to, kAll);
        const auto by_ops = cast_to_float8_by_ops(x, to, kAll);
        CHECK(by_ops.inverse_scale.equal(by_kernel.inverse_scale));
        CHECK(same_bytes(by_ops.rows, by_kernel.rows));
        CHECK(same_bytes(by_ops.columns, by_kernel.columns));
      }
    }
  });
}

TEST_CASE("cast_all_to_float8: each matrix as cast_to_float8() casts it", "[float8]") {
  at::manual_seed(6);
  const std::vector<Float8CastRequest> requests{
      {wide_range({48, 32}), {.rows = true, .columns = true}},
      {wide_range({17, 5}).to(c10::kHalf), kAll},
      {wide_range({32, 64}).t(), {.columns = true}},
      {wide_range({40, 24}).to(c10::kBFloat16).t(), {.rows = true}},
      {wide_range({16, 16}) * 1e-20, {.rows = true}},
  };
  const auto casts = cast_all_to_float8(requests, c10::kFloat8_e4m3fn);
  REQUIRE(casts.size() == requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    const auto expected =
        cast_to_float8(requests[i].matrix, c10::kFloat8_e4m3fn, requests[i].wanted);
    CHECK(casts[i].rows.defined() == expected.rows.defined());
    CHECK(casts[i].columns.defined() == expected.columns.defined());
    CHECK(casts[i].column_sums.defined() == expected.column_sums.defined());
    CHECK(casts[i].inverse_scale.equal(expected.inverse_scale));
    CHECK((!expected.rows.defined() || same_bytes(casts[i].rows, expected.rows)));
    CHECK((!expected.columns.defined() || same_bytes(casts[i].columns, expected.columns)));
    CHECK((!expected.column_sums.defined() || casts[i].column_sums.equal(expected.column_sums)));
  }
  CHECK(cast_all_to_float8({}, c10::kFloat8_e5m2).empty());
}
