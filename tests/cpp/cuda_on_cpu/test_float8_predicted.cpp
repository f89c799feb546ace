// SPDX-License-Identifier: Apache-2.0
// Emulated: casts of matrices to fp8 by predicted scales have the CPU kernel's bits, whether the
// prediction holds or not.

#include "cuda_on_cpu/float8_case.h"
#include "kernels/functors/float8.h"
#include "support/catch.h"

#include <array>
#include <cmath>
#include <limits>

using namespace fastamp::test;
using fastamp::kernels::bits_of;
using fastamp::kernels::kUnknownAmax;

namespace {

/// Casts by prediction, twice: the second time with what the first one has left.
void check(const Matrix& matrix, std::uint32_t last_amax, std::uint32_t headroom,
           Wanted wanted = {}) {
  const auto range = fastamp::kernels::cpu::float8_range(
      matrix.in.const_data_ptr(), matrix.in.scalar_type(), matrix.in.numel());
  std::uint32_t memory = last_amax;
  CAPTURE(matrix.rows, matrix.columns, matrix.in.scalar_type(), matrix.to, last_amax, headroom);
  for (const auto known : {last_amax, range.amax}) {
    const Outputs outputs(matrix, wanted);
    fastamp::kernels::cuda::cast_to_float8_predicted(entry_of(matrix, outputs), {&memory, headroom},
                                                     c10::Device(c10::kCPU));
    check_outputs(outputs, cast_on_cpu(matrix, wanted, {known, headroom}));
    CHECK(memory == range.amax);
  }
}

Matrix matrix_of(Values& values, std::int64_t rows, std::int64_t columns, at::ScalarType from,
                 at::ScalarType to) {
  return {values.tensor(rows * columns, from, 1), rows, columns, to};
}

constexpr std::array<at::ScalarType, 2> kFormats = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};

}  // namespace

TEST_CASE("emulated predicted float8 cast: every size", "[float8_predicted]") {
  const std::vector<std::int64_t> rows =
      brief() ? std::vector<std::int64_t>{17, 65} : std::vector<std::int64_t>{1, 16, 17, 64, 197};
  const std::vector<std::int64_t> columns =
      brief() ? std::vector<std::int64_t>{36} : std::vector<std::int64_t>{4, 17, 32, 36, 136};
  for_each_shape([&] {
    Values values(1);
    for (const auto m : rows) {
      for (const auto k : columns) {
        const auto from = m % 3 == 0 ? at::kHalf : m % 2 == 0 ? at::kBFloat16 : at::kFloat;
        for (const auto to : kFormats) {
          check(matrix_of(values, m, k, from, to), kUnknownAmax, 1);
        }
      }
    }
  });
}

TEST_CASE("emulated predicted float8 cast: the amax has moved by any number of binades",
          "[float8_predicted]") {
  for_each_shape([&] {
    Values values(2);
    for (const auto to : kFormats) {
      const auto matrix = matrix_of(values, 33, 40, at::kFloat, to);
      const auto amax = matrix.in.abs().max().item<float>();
      for (const std::uint32_t headroom : {0U, 1U, 2U}) {
        for (int binades = -7; binades <= 7; binades += brief() ? 7 : 1) {
          check(matrix, bits_of(std::ldexp(amax, binades)), headroom);
        }
      }
      check(matrix, 0, 1);  // The last tensor was all zeros.
      check(matrix, bits_of(1e-40F), 1);
      check(matrix, bits_of(std::numeric_limits<float>::max()), 2);
    }
  });
}

TEST_CASE("emulated predicted float8 cast: inf and NaN, zeros", "[float8_predicted]") {
  for_each_shape([&] {
    Values values(3);
    for (const auto to : kFormats) {
      const auto matrix = matrix_of(values, 17, 36, at::kBFloat16, to);
      const auto amax = matrix.in.abs().max().item<float>();
      set_element(matrix.in, 35, INFINITY);
      set_element(matrix.in, 17 * 36 - 1, NAN);
      check(matrix, bits_of(amax), 1);
      check(matrix, bits_of(amax * 64), 1);
      check({copy_of(matrix.in).zero_(), 17, 36, to}, bits_of(1.0F), 1);
    }
  });
}

TEST_CASE("emulated predicted float8 cast: only what is wanted is written", "[float8_predicted]") {
  for_each_shape([&] {
    Values values(4);
    const auto matrix = matrix_of(values, 20, 24, at::kHalf, at::kFloat8_e4m3fn);
    for (const Wanted wanted : {Wanted{true, false, false}, Wanted{false, true, false},
                                Wanted{false, false, true}, Wanted{true, true, false}}) {
      check(matrix, bits_of(1e-3F), 1, wanted);
    }
  });
}

TEST_CASE("emulated predicted float8 cast: calls that wait in a stream", "[float8_predicted]") {
  emulator::device() = {1, 512};
  emulator::Stream stream(31);
  stream.late = true;
  Values values(5);
  const auto matrix = matrix_of(values, 40, 48, at::kFloat, at::kFloat8_e5m2);
  std::uint32_t memory = kUnknownAmax;
  std::vector<Outputs> outputs;
  const emulator::UseStream use(stream);
  for (int call = 0; call < 3; ++call) {
    outputs.emplace_back(matrix, Wanted{});
    fastamp::kernels::cuda::cast_to_float8_predicted(entry_of(matrix, outputs.back()), {&memory, 2},
                                                     c10::Device(c10::kCPU));
  }
  CHECK(memory == kUnknownAmax);
  stream.synchronize();
  const auto amax = bits_of(matrix.in.abs().max().item<float>());
  check_outputs(outputs[0], cast_on_cpu(matrix, {}, {kUnknownAmax, 2}));
  check_outputs(outputs[1], cast_on_cpu(matrix, {}, {amax, 2}));
  check_outputs(outputs[2], cast_on_cpu(matrix, {}, {amax, 2}));
  CHECK(memory == amax);
}
