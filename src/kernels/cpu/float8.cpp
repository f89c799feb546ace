// SPDX-License-Identifier: Apache-2.0
// CPU kernels of casts to fp8.
//
// Layout: a dense row-major matrix in; row-major and transposed copies out, the rows of the latter
// padded with zeros. Mapping: the range in equal pieces; the cast in stripes of 64 columns, one
// thread each, in tiles of 16 rows, so that no two threads write one cache line of the row-major
// copy, and the transposed copy is written 16 bytes at a time. Traffic per element: the input twice
// and one byte per copy. Numerics: kernels/functors/float8.h; the sums of a column do not depend on
// the number of threads. This is the reference, not a fast kernel. Proof:
// tests/cpp/autocast/test_float8_cast.cpp.

#include "kernels/cpu/float8.h"

#include "kernels/functors/float8.h"
#include "kernels/functors/float8_copy.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>

namespace fastamp::kernels::cpu {
namespace {

using c10::ScalarType;

constexpr std::int64_t kStripe = 64;
/// Below this many elements a second thread costs more than it saves.
constexpr std::int64_t kGrain = 16384;

template <typename In>
Float8Range range_of(const In* in, std::int64_t begin, std::int64_t end) {
  Float8Magnitudes seen{};
  for (auto i = begin; i < end; ++i) {
    seen.include(static_cast<float>(in[i]));
  }
  return {seen.amax, seen.is_finite()};
}

Float8Range both(Float8Range a, Float8Range b) {
  return {std::max(a.amax, b.amax), a.is_finite && b.is_finite};
}

/// Calls `function` with a null pointer to the input's element type.
template <typename Function>
auto with_input(ScalarType from, const Function& function) {
  switch (from) {
    case ScalarType::Float:
      return function(static_cast<const float*>(nullptr));
    case ScalarType::BFloat16:
      return function(static_cast<const c10::BFloat16*>(nullptr));
    default:
      TORCH_INTERNAL_ASSERT(from == ScalarType::Half);
      return function(static_cast<const c10::Half*>(nullptr));
  }
}

/// A stripe of columns, from the first row to the last.
template <typename In, typename Out, bool kFinite>
class Stripe {
 public:
  Stripe(const Float8CastArgs& args, float scale, std::int64_t first, std::int64_t last)
      : args_(args), scale_(scale), first_(first), last_(last) {}

  void run() {
    for (std::int64_t row = 0; row < args_.rows; row += kFloat8TileRows) {
      const auto height = std::min(kFloat8TileRows, args_.rows - row);
      cast_tile(row, height);
      write_transposed(row, height);
    }
    if (args_.column_sums != nullptr) {
      for (auto column = first_; column < last_; ++column) {
        args_.column_sums[column] = static_cast<float>(sums_[at(column)]);
      }
    }
    pad();
  }

 private:
  std::size_t at(std::int64_t column) const { return static_cast<std::size_t>(column - first_); }

  void cast_tile(std::int64_t row, std::int64_t height) {
    const auto* in = static_cast<const In*>(args_.in);
    std::array<float, kStripe> sums{};
    for (std::int64_t i = 0; i < height; ++i) {
      const auto start = (row + i) * args_.columns;
      auto& casts = tile_[static_cast<std::size_t>(i)];
      for (auto column = first_; column < last_; ++column) {
        const auto value = static_cast<float>(in[start + column]);
        sums[at(column)] += value;
        casts[at(column)] =
            kFinite ? float8_of_finite<Out>(value, scale_) : float8_of<Out>(value, scale_);
      }
      if (args_.row_major != nullptr) {
        std::copy_n(casts.begin(), last_ - first_,
                    static_cast<Out*>(args_.row_major) + start + first_);
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums_[i] += static_cast<double>(sums[i]);
    }
  }

  void write_transposed(std::int64_t row, std::int64_t height) {
    if (args_.transposed == nullptr) {
      return;
    }
    for (auto column = first_; column < last_; ++column) {
      Out* out = static_cast<Out*>(args_.transposed) + column * args_.padded_rows + row;
      for (std::int64_t i = 0; i < height; ++i) {
        out[i] = tile_[static_cast<std::size_t>(i)][at(column)];
      }
    }
  }

  void pad() {
    if (args_.transposed == nullptr) {
      return;
    }
    for (auto column = first_; column < last_; ++column) {
      Out* out = static_cast<Out*>(args_.transposed) + column * args_.padded_rows;
      std::fill(out + args_.rows, out + args_.padded_rows, Out(0, Out::from_bits()));
    }
  }

  const Float8CastArgs& args_;
  float scale_;
  std::int64_t first_;
  std::int64_t last_;
  std::array<std::array<Out, kStripe>, kFloat8TileRows> tile_;
  std::array<double, kStripe> sums_{};
};

template <typename In, typename Out>
float cast_to(const Float8CastArgs& args) {
  const float scale = from_bits(args.exponent << 23U);
  const auto stripes = (args.columns + kStripe - 1) / kStripe;
  const auto grain =
      std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, kStripe * args.rows));
  at::parallel_for(0, stripes, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto stripe = begin; stripe < end; ++stripe) {
      const auto first = stripe * kStripe;
      const auto last = std::min(first + kStripe, args.columns);
      if (args.range.is_finite) {
        Stripe<In, Out, true>(args, scale, first, last).run();
      } else {
        Stripe<In, Out, false>(args, scale, first, last).run();
      }
    }
  });
  return inverse_of_power_of_two(scale);
}

}  // namespace

Float8Range float8_range(const void* in, ScalarType from, std::int64_t n) {
  return with_input(from, [&](const auto* type) {
    using In = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    const auto* data = static_cast<const In*>(in);
    return at::parallel_reduce(
        std::int64_t{0}, n, kGrain, Float8Range{0, true},
        [&](std::int64_t begin, std::int64_t end, Float8Range so_far) {
          return both(so_far, range_of(data, begin, end));
        },
        both);
  });
}

std::uint32_t float8_exponent_for(Float8Range range, ScalarType to) {
  return to == ScalarType::Float8_e4m3fn
             ? float8_exponent<Float8Format<c10::Float8_e4m3fn>::kTop>(range.amax)
             : float8_exponent<Float8Format<c10::Float8_e5m2>::kTop>(range.amax);
}

float float8_cast(const Float8CastArgs& args) {
  return with_input(args.from, [&](const auto* type) {
    using In = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    return args.to == ScalarType::Float8_e4m3fn ? cast_to<In, c10::Float8_e4m3fn>(args)
                                                : cast_to<In, c10::Float8_e5m2>(args);
  });
}

namespace {

/// The bytes of a matrix, transposed in squares of 16: the lines that a thread reads and writes
/// stay in its cache.
void transpose_bytes(const std::uint8_t* in, std::uint8_t* out, std::int64_t rows,
                     std::int64_t columns) {
  constexpr std::int64_t kSide = kFloat8TileRows;
  const auto grain = std::max<std::int64_t>(1, kGrain / (kSide * rows));
  at::parallel_for(0, columns / kSide, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto column = begin * kSide; column < end * kSide; column += kSide) {
      for (std::int64_t row = 0; row < rows; row += kSide) {
        for (std::int64_t i = 0; i < kSide; ++i) {
          for (std::int64_t k = 0; k < kSide; ++k) {
            out[(column + i) * rows + row + k] = in[(row + k) * columns + column + i];
          }
        }
      }
    }
  });
}

}  // namespace

void refresh_float8_copy(const Float8CopyArgs& args) {
  Float8CopyHeader& header = *float8_header(args.copy);
  const Float8CopyRefresh refresh(header);
  if (!refresh.has_step) {
    return;
  }
  if (!refresh.stands) {
    float8_cast({.in = args.weight,
                 .from = ScalarType::Float,
                 .to = ScalarType::Float8_e4m3fn,
                 .rows = args.rows,
                 .columns = args.columns,
                 .range = {header.amax - 1, refresh.is_finite},
                 .exponent = bits_of(refresh.scale) >> 23U,
                 .row_major = args.copy,
                 .transposed = args.transposed,
                 .padded_rows = args.rows,
                 .column_sums = nullptr});
  } else if (args.transposed != nullptr) {
    transpose_bytes(static_cast<const std::uint8_t*>(args.copy),
                    static_cast<std::uint8_t*>(args.transposed), args.rows, args.columns);
  }
  header = refresh.header();
}

}  // namespace fastamp::kernels::cpu
