// SPDX-License-Identifier: Apache-2.0
// Emulated: casts of matrices to fp8 have the CPU kernel's bits in all that is written.

#include "cuda_on_cpu/float8_case.h"
#include "kernels/cuda/float8.h"
#include "kernels/functors/float8.h"
#include "support/catch.h"

#include <array>
#include <cmath>
#include <limits>

using namespace fastamp::test;
using fastamp::kernels::cuda::cast_to_float8;
using fastamp::kernels::cuda::Float8CastEntry;

namespace {

void cast(const std::vector<Matrix>& matrices, const std::vector<Outputs>& outputs) {
  std::vector<Float8CastEntry> entries;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    entries.push_back(entry_of(matrices[i], outputs[i]));
  }
  cast_to_float8(std::move(entries), c10::Device(c10::kCPU));
}

/// Casts all in one call, and compares each with the CPU kernel.
void check(const std::vector<Matrix>& matrices, Wanted wanted = {}) {
  std::vector<Outputs> outputs;
  outputs.reserve(matrices.size());
  for (const auto& matrix : matrices) {
    outputs.emplace_back(matrix, wanted);
  }
  cast(matrices, outputs);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const auto& matrix = matrices[i];
    CAPTURE(i, matrix.rows, matrix.columns, matrix.in.scalar_type(), matrix.to);
    check_outputs(outputs[i], cast_on_cpu(matrix, wanted));
  }
}

constexpr std::array<at::ScalarType, 3> kInputs = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr std::array<at::ScalarType, 2> kFormats = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};

/// Around bands, tiles, groups of four columns; with fewer where each thread costs much.
const std::vector<std::int64_t>& row_counts() {
  static const std::vector<std::int64_t> all = {1, 15, 16, 17, 63, 64, 65, 197};
  static const std::vector<std::int64_t> few = {17, 65};
  return brief() ? few : all;
}
const std::vector<std::int64_t>& column_counts() {
  static const std::vector<std::int64_t> all = {1, 4, 16, 17, 24, 31, 32, 34, 36, 128, 136};
  static const std::vector<std::int64_t> few = {17, 36};
  return brief() ? few : all;
}

/// A matrix of each size, in dtypes and formats that take turns from `turn` on.
std::vector<Matrix> every_size(Values& values, std::size_t turn, std::size_t skew, float spread) {
  std::vector<Matrix> matrices;
  for (const auto rows : row_counts()) {
    for (const auto columns : column_counts()) {
      const auto i = matrices.size() + turn;
      const auto from = kInputs[i % 3];
      matrices.push_back({values.tensor(rows * columns, from, i * skew % 9, spread), rows, columns,
                          kFormats[i / 3 % 2]});
    }
  }
  return matrices;
}

template <typename Check>
void for_all_pairs(const Check& check_pair) {
  for (const auto from : kInputs) {
    for (const auto to : kFormats) {
      check_pair(from, to);
    }
  }
}

}  // namespace

TEST_CASE("emulated float8 cast: every size, one matrix at a time", "[float8_cast]") {
  emulator::device() = {1, 512};
  Values values(1);
  for (const auto& matrix : every_size(values, 0, 0, 3.0F)) {
    check({matrix});
  }
}

TEST_CASE("emulated float8 cast: lists of matrices, every alignment", "[float8_cast]") {
  // Each shape of a launch has half of the dtype pairs, at every address or on boundaries.
  std::size_t shape = 0;
  for_each_shape([&] {
    Values values(2);
    for (const std::size_t turn : {0U, 1U, 2U}) {
      const bool aligned = shape < 2 && !brief();
      check(every_size(values, turn + shape % 2 * 3, aligned ? 0 : 1, aligned ? 1e-3F : 1e4F));
    }
    ++shape;
  });
}

TEST_CASE("emulated float8 cast: every 16-bit value, six dtype pairs", "[float8_cast]") {
  emulator::device() = {1, 512};
  for_all_pairs([](at::ScalarType from, at::ScalarType to) {
    if (brief() && (from == at::kFloat || to == at::kFloat8_e5m2)) {
      return;
    }
    for (const auto limit : {0x1p-120F, 1.0F, 65504.0F, 3.4e38F, INFINITY}) {
      auto in = guarded(65536, from);
      for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        // Of the dtype itself; of bfloat16 for float32.
        const auto pattern = static_cast<std::uint16_t>(bits);
        const float value =
            from == at::kHalf
                ? static_cast<float>(c10::Half(pattern, c10::Half::from_bits()))
                : static_cast<float>(c10::BFloat16(pattern, c10::BFloat16::from_bits()));
        set_element(in, bits, limit == INFINITY || std::abs(value) <= limit ? value : 0.0F);
      }
      check({{in, 256, 256, to}}, {.sums = false});
      if (brief()) {
        break;
      }
    }
  });
}

TEST_CASE("emulated float8 cast: inf and NaN anywhere", "[float8_cast]") {
  for_each_shape([] {
    Values values(3);
    for_all_pairs([&](at::ScalarType from, at::ScalarType to) {
      std::vector<Matrix> matrices;
      for (const std::int64_t columns : {32, 33}) {
        for (const std::int64_t where : {std::int64_t{0}, 40 * columns + 7, 67 * columns - 1}) {
          for (const float value : {INFINITY, -INFINITY, NAN}) {
            auto in = values.tensor(67 * columns, from);
            set_element(in, where, value);
            matrices.push_back({in, 67, columns, to});
          }
        }
        // The neighbour of tensors that are not finite is cast as ever.
        matrices.push_back({values.tensor(67 * columns, from), 67, columns, to});
      }
      if (brief()) {
        matrices.resize(3);
      }
      check(matrices, {.sums = false});
    });
  });
}

TEST_CASE("emulated float8 cast: zeros, subnormals, the largest", "[float8_cast]") {
  for_all_pairs([](at::ScalarType from, at::ScalarType to) {
    std::vector<Matrix> matrices;
    for (const float value :
         {0.0F, -0.0F, 0x1p-149F, 0x1.8p-130F, 0x1p-126F, 0x1p-24F, 65504.0F, 3.38e38F}) {
      auto in = guarded(std::int64_t{20} * 16, from);
      for (std::int64_t i = 0; i < in.numel(); ++i) {
        set_element(in, i, i % 3 == 0 ? -value : value / static_cast<float>(i % 7 + 1));
      }
      matrices.push_back({in, 20, 16, to});
    }
    check(matrices);
  });
}

TEST_CASE("emulated float8 cast: only what is wanted is written", "[float8_cast]") {
  Values values(4);
  for (const std::int64_t columns : {32, 33}) {
    for (const unsigned choice : {0U, 1U, 2U, 3U, 4U, 5U, 6U}) {
      const Wanted wanted{(choice & 1U) != 0, (choice & 2U) != 0, (choice & 4U) != 0};
      check({{values.tensor(37 * columns, at::kBFloat16), 37, columns, at::kFloat8_e4m3fn}},
            wanted);
    }
  }
}

TEST_CASE("emulated float8 cast: sums are taken in order, in fp32 and then in fp64",
          "[float8_cast]") {
  for_each_shape([] {
    // In order, each is 0 + ... = 0; from the last to the first, 1; in wider sums, 1.
    for (const std::int64_t columns : {8, 7}) {
      auto in_a_tile = guarded(48 * columns, at::kFloat);
      auto over_tiles = guarded(48 * columns, at::kFloat);
      for (std::int64_t row = 0; row < 48; ++row) {
        constexpr std::array<float, 3> kFp32 = {1.0F, 0x1p30F, -0x1p30F};
        constexpr std::array<float, 3> kFp64 = {1.0F, 0x1p60F, -0x1p60F};
        for (std::int64_t i = 0; i < columns; ++i) {
          const auto at = row * columns + i;
          set_element(in_a_tile, at, row < 3 ? kFp32[static_cast<std::size_t>(row)] : 0.0F);
          set_element(over_tiles, at,
                      row % 16 == 5 ? kFp64[static_cast<std::size_t>(row / 16)] : 0.0F);
        }
      }
      for (const auto& in : {in_a_tile, over_tiles}) {
        const Matrix matrix{in, 48, columns, at::kFloat8_e5m2};
        const Outputs out(matrix, {});
        cast({matrix}, {out});
        CHECK(out.sums.const_data_ptr<float>()[columns - 1] == 0.0F);
        CHECK(same_bits(out.all(), cast_on_cpu(matrix, {}).all()));
      }
      // 2^25 + 1 - 2^25 over tiles: fp32 sums would lose the 1.
      auto exact = guarded(48 * columns, at::kFloat);
      for (std::int64_t i = 0; i < exact.numel(); ++i) {
        const auto row = i / columns;
        const float value = row == 0 ? 0x1p25F : (row == 16 ? 1.0F : -0x1p25F);
        set_element(exact, i, row % 16 == 0 ? value : 0.0F);
      }
      const Matrix matrix{exact, 48, columns, at::kFloat8_e4m3fn};
      const Outputs out(matrix, {});
      cast({matrix}, {out});
      CHECK(out.sums.const_data_ptr<float>()[0] == 1.0F);
    }
  });
}

TEST_CASE("emulated float8 cast: nothing of a call is left for the next", "[float8_cast]") {
  Values values(5);
  auto large = values.tensor(640, at::kFloat, 0, 1e6F);
  set_element(large, 100, NAN);
  const auto small = values.tensor(640, at::kFloat, 0, 1e-6F);
  for (const auto& in : {large, small}) {
    check({{in, 20, 32, at::kFloat8_e4m3fn}, {small, 20, 32, at::kFloat8_e4m3fn}});
  }
}

TEST_CASE("emulated float8 cast: empty matrices, and none", "[float8_cast]") {
  const auto before = emulator::statistics().launches;
  cast({}, {});
  CHECK(emulator::statistics().launches == before);
  Values values(6);
  const auto none = guarded(0, at::kHalf);
  const auto some = values.tensor(17 * 16, at::kHalf);
  check({{none, 0, 16, at::kFloat8_e4m3fn},
         {some, 17, 16, at::kFloat8_e4m3fn},
         {none, 5, 0, at::kFloat8_e4m3fn},
         {some, 16, 17, at::kFloat8_e5m2}});
  check({{none, 0, 16, at::kFloat8_e4m3fn}});
}

TEST_CASE("emulated float8 cast: two launches for any number of matrices", "[float8_cast]") {
  emulator::device() = {1, 512};
  Values values(7);
  // Tables in the small arguments, in the large ones, in device memory.
  for (const std::size_t count : {10U, 100U, 600U}) {
    if (brief() && count == 100) {
      continue;
    }
    std::vector<Matrix> matrices;
    for (std::size_t i = 0; i < count; ++i) {
      const auto rows = static_cast<std::int64_t>(1 + i % 19);
      matrices.push_back({values.tensor(rows * 16, kInputs[i % 3], 0, static_cast<float>(i + 1)),
                          rows, 16, kFormats[i % 2]});
    }
    const auto before = emulator::statistics().launches;
    check(matrices, {.sums = false});
    CHECK(emulator::statistics().launches - before == 2);
  }
}

TEST_CASE("emulated float8 cast: on a stream that runs late, and in a graph", "[float8_cast]") {
  emulator::device() = {1, 512};
  emulator::Stream captured(21);
  emulator::Stream other(22);
  captured.late = true;
  other.late = true;
  Values values(8);
  const std::vector<Matrix> matrices = {
      {values.tensor(37 * 32, at::kBFloat16), 37, 32, at::kFloat8_e5m2},
      {values.tensor(20 * 33, at::kFloat), 20, 33, at::kFloat8_e4m3fn}};
  std::vector<Outputs> outputs;
  for (const auto& matrix : matrices) {
    outputs.emplace_back(matrix, Wanted{});
  }
  const auto check_all = [&] {
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      CHECK(same_bits(outputs[i].all(), cast_on_cpu(matrices[i], {}).all()));
    }
  };
  const emulator::UseStream use(captured);
  cast(matrices, outputs);
  captured.synchronize();
  check_all();
  emulator::Graph graph;
  {
    const emulator::Capture capture(captured, graph);
    cast(matrices, outputs);
  }
  // Replays find the scale of what is there then.
  for (emulator::Stream* const stream : {&other, &captured}) {
    for (const auto& matrix : matrices) {
      for (std::int64_t i = 0; i < matrix.in.numel(); ++i) {
        set_element(matrix.in, i, element_of(matrix.in, i) * -0.3F);
      }
    }
    stream->replay(graph);
    stream->synchronize();
    check_all();
  }
}

TEST_CASE("emulated float8 cast: on two streams at once", "[float8_cast]") {
  // Nothing orders the streams: ThreadSanitizer reports whatever they share.
  emulator::device() = {1, 512};
  emulator::Stream one(23);
  emulator::Stream two(24);
  Values values(9);
  const Matrix first{values.tensor(37 * 32, at::kBFloat16), 37, 32, at::kFloat8_e5m2};
  const Matrix second{values.tensor(20 * 33, at::kFloat, 0, 1e4F), 20, 33, at::kFloat8_e4m3fn};
  const Outputs of_first(first, {});
  const Outputs of_second(second, {});
  const auto on = [](emulator::Stream& stream, const Matrix& matrix, const Outputs& out) {
    stream.late = true;
    const emulator::UseStream use(stream);
    cast({matrix}, {out});
  };
  on(one, first, of_first);
  on(two, second, of_second);
  two.synchronize();
  one.synchronize();
  CHECK(same_bits(of_first.all(), cast_on_cpu(first, {}).all()));
  CHECK(same_bits(of_second.all(), cast_on_cpu(second, {}).all()));
}
