// SPDX-License-Identifier: Apache-2.0
// Emulated: refreshes of the fp8 copies that steps have written leave the casts of the weights, and
// the CPU kernel's bits. (test_fused_* show that steps leave the CPU kernel's bits in copies and
// headers.)

#include "cuda_on_cpu/float8_case.h"
#include "cuda_on_cpu/step_case.h"
#include "kernels/functors/float8_copy.h"
#include "support/catch.h"

#include <array>
#include <cmath>
#include <cstring>

using namespace fastamp::test;
namespace kernels = fastamp::kernels;
using kernels::Float8CopyHeader;

namespace {

constexpr auto kE4M3 = at::kFloat8_e4m3fn;

/// A weight and its copy as a step has left them: cast by some scale, with the range in the header.
struct Stepped {
  at::Tensor weight;
  std::int64_t rows;
  std::int64_t columns;
  at::Tensor copy;
  at::Tensor transposed;

  Float8CopyHeader& header() const { return *kernels::float8_header(copy.mutable_data_ptr()); }

  Stepped twin() const {
    return {weight, rows, columns, copies_with_headers({copy})[0],
            transposed.defined() ? copy_of(transposed) : at::Tensor()};
  }
};

/// @param binades  By how much the copy's scale differs from that of a cast.
Stepped make_stepped(Values& values, std::int64_t rows, std::int64_t columns, int binades,
                     bool transposes) {
  // Half of them are aligned, and cast four elements at a time if all are finite.
  const std::size_t skew = binades % 2 == 0 ? 0 : 1;
  Stepped made{values.tensor(rows * columns, at::kFloat, skew), rows, columns,
               float8_copy(values, rows * columns),
               transposes ? guarded(rows * columns, kE4M3) : at::Tensor()};
  const auto range =
      kernels::cpu::float8_range(made.weight.const_data_ptr(), at::kFloat, rows * columns);
  const float scale = std::ldexp(kernels::float8_scale<c10::Float8_e4m3fn>(range.amax), binades);
  auto* const out = made.copy.mutable_data_ptr<c10::Float8_e4m3fn>();
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    out[i] = kernels::float8_of_finite<c10::Float8_e4m3fn>(made.weight.const_data_ptr<float>()[i],
                                                           scale);
  }
  made.header() = {1 / scale, range.amax + 1, 0, 0};
  return made;
}

void set_weight(const Stepped& stepped, std::int64_t index, float value) {
  set_element(stepped.weight, index, value);
  stepped.header().not_finite |= std::isfinite(value) ? 0U : 1U;
}

void refresh(const std::vector<Stepped>& all) {
  std::vector<kernels::cuda::Float8CopyEntry> entries;
  for (const auto& one : all) {
    entries.push_back({one.weight.const_data_ptr(), one.rows, one.columns,
                       one.copy.mutable_data_ptr(),
                       one.transposed.defined() ? one.transposed.mutable_data_ptr() : nullptr});
  }
  kernels::cuda::refresh_float8_copies(entries, c10::Device(c10::kCPU));
}

void refresh_on_cpu(const Stepped& one) {
  kernels::cpu::refresh_float8_copy(
      {one.weight.const_data_ptr(), one.rows, one.columns, one.copy.mutable_data_ptr(),
       one.transposed.defined() ? one.transposed.mutable_data_ptr() : nullptr});
}

/// What a cast of the weight gives.
void check_is_cast(const Stepped& one) {
  CAPTURE(one.rows, one.columns);
  const Outputs cast = cast_on_cpu({one.weight, one.rows, one.columns, kE4M3}, {true, true, false});
  CHECK(same_bits(one.copy, cast.row_major.view({-1})));
  if (one.transposed.defined()) {
    CHECK(same_bits(one.transposed, cast.transposed.view({-1})));
  }
  CHECK(one.header().inverse_scale == value_of(cast.inverse_scale));
  CHECK(one.header().amax == 0);
  CHECK(one.header().not_finite == 0);
}

void check_refreshed(const std::vector<Stepped>& all) {
  std::vector<Stepped> twins;
  for (const auto& one : all) {
    twins.push_back(one.twin());
    refresh_on_cpu(twins.back());
  }
  refresh(all);
  for (std::size_t i = 0; i < all.size(); ++i) {
    check_is_cast(all[i]);
    CHECK(same_bits(with_header(all[i].copy), with_header(twins[i].copy)));
  }
}

}  // namespace

TEST_CASE("emulated refresh: every size, with scales that stand and scales that do not",
          "[float8_copies]") {
  const std::vector<std::int64_t> sides =
      brief() ? std::vector<std::int64_t>{16, 48} : std::vector<std::int64_t>{16, 32, 48, 80, 144};
  for_each_shape([&] {
    Values values(1);
    std::vector<Stepped> all;
    int binades = 0;
    for (const auto rows : sides) {
      for (const auto columns : sides) {
        all.push_back(make_stepped(values, rows, columns, binades, binades % 2 == 0));
        binades = binades == 3 ? -3 : binades + 1;
      }
    }
    check_refreshed(all);
  });
}

TEST_CASE("emulated refresh: what a skipped step left stays", "[float8_copies]") {
  for_each_shape([&] {
    Values values(2);
    const auto stepped = make_stepped(values, 32, 48, 1, true);
    stepped.header().amax = 0;
    const auto before = stepped.twin();
    refresh({stepped});
    CHECK(same_bits(with_header(stepped.copy), with_header(before.copy)));
    CHECK(same_bits(stepped.transposed, before.transposed));
    refresh_on_cpu(stepped);
    CHECK(same_bits(with_header(stepped.copy), with_header(before.copy)));
  });
}

TEST_CASE("emulated refresh: inf, NaN and zeros", "[float8_copies]") {
  for_each_shape([&] {
    Values values(3);
    const auto broken = make_stepped(values, 32, 32, 0, true);
    set_weight(broken, 0, INFINITY);
    set_weight(broken, 517, -INFINITY);
    set_weight(broken, 1023, NAN);
    const auto range = kernels::cpu::float8_range(broken.weight.const_data_ptr(), at::kFloat, 1024);
    broken.header().amax = range.amax + 1;
    const auto zeros = make_stepped(values, 16, 64, 2, true);
    zeros.weight.zero_();
    zeros.header().amax = 1;
    check_refreshed({broken, zeros, make_stepped(values, 16, 16, 0, false)});
  });
}

TEST_CASE("emulated refresh: lists that need each home of the table", "[float8_copies]") {
  const auto count = GENERATE(std::size_t{20}, std::size_t{150}, std::size_t{700});
  if (brief() && count != 150) {
    return;
  }
  emulator::device() = {1, 512};
  Values values(4);
  std::vector<Stepped> all;
  for (std::size_t i = 0; i < count; ++i) {
    all.push_back(make_stepped(values, 16, 16, i % 3 == 0 ? 0 : 1, i % 2 == 0));
  }
  check_refreshed(all);
}

TEST_CASE("emulated refresh: calls that wait in a stream", "[float8_copies]") {
  emulator::device() = {1, 512};
  emulator::Stream stream(31);
  stream.late = true;
  Values values(5);
  const auto stepped = make_stepped(values, 48, 32, -1, true);
  const emulator::UseStream use(stream);
  refresh({stepped});
  refresh({stepped});  // Finds what the first has left.
  CHECK(stream.waiting() >= 2);
  stream.synchronize();
  check_is_cast(stepped);
}
