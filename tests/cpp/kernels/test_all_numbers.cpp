// SPDX-License-Identifier: Apache-2.0
// Every float32 to 16 and 8 bits, every 16-bit value back, every code of a moment: the conversions
// of each instruction set against a definition in integers that shares nothing with them.
//
// SEEDS=10 or more (as for the nets in tests/python/nets) goes through all 2^32 floats, in
// minutes; without it one block of 2^16 of 61 is taken, in seconds.

#include "kernels/cpu/dispatch.h"
#include "kernels/functors/float8.h"
#include "kernels/functors/moment_codes.h"
#include "support/catch.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using namespace fastamp::kernels;
using cpu::Targets;

constexpr std::uint32_t kBlock = 1U << 16U;

/// A binary floating-point format, as IEEE 754 describes one.
struct Format {
  int exponent_bits;
  int fraction_bits;
  std::uint32_t largest;   ///< Code of the largest finite value.
  std::uint32_t infinity;  ///< What inf becomes.
  std::uint32_t beyond;    ///< What finite values become that round beyond the largest.
};

constexpr Format kBFloat16{8, 7, 0x7f7fU, 0x7f80U, 0x7f80U};
constexpr Format kFloat16{5, 10, 0x7bffU, 0x7c00U, 0x7c00U};
constexpr Format kE4m3{4, 3, 0x7eU, 0x7fU, 0x7eU};
constexpr Format kE5m2{5, 2, 0x7bU, 0x7cU, 0x7bU};

/// Divides by 2^shift to the nearest integer, ties to even, by comparing with the half.
std::uint64_t divide(std::uint64_t value, int shift) {
  if (shift > 40) {
    return 0;
  }
  const std::uint64_t unit = std::uint64_t{1} << static_cast<unsigned>(shift);
  const std::uint64_t quotient = value / unit;
  const std::uint64_t twice = 2 * (value % unit);
  const bool up = twice > unit || (twice == unit && quotient % 2 == 1);
  return quotient + (up ? 1 : 0);
}

/// The code of a float32 that is not NaN, without its sign.
std::uint32_t expected_magnitude(std::uint32_t bits, const Format& format) {
  const int exponent = static_cast<int>((bits >> 23U) & 255U);
  const std::uint32_t fraction = bits & 0x7fffffU;
  if (exponent == 255) {
    return format.infinity;
  }
  // The value is significand * 2^(power - 149).
  const std::uint64_t significand = exponent == 0 ? fraction : fraction | 0x800000U;
  const int power = exponent == 0 ? 0 : exponent - 1;
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  // The lowest binade, in units of the format: all below it have the same unit.
  const int lowest = 127 - bias;
  const int binade = power < lowest ? lowest : power;
  const int dropped = 23 - format.fraction_bits + binade - power;
  const std::uint64_t units = divide(significand, dropped);
  // Units of the binade: the leading one of normal values counts in the exponent.
  const std::uint64_t code =
      units + (static_cast<std::uint64_t>(binade - lowest) << format.fraction_bits);
  return code > format.largest ? format.beyond : static_cast<std::uint32_t>(code);
}

bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffffU) > 0x7f800000U; }

/// The value of a 16-bit code, exactly.
double value_of(std::uint32_t code, const Format& format) {
  const std::uint32_t exponent =
      (code >> format.fraction_bits) & ((1U << format.exponent_bits) - 1U);
  const std::uint32_t fraction = code & ((1U << format.fraction_bits) - 1U);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int unit = (exponent == 0 ? 1 : static_cast<int>(exponent)) - bias - format.fraction_bits;
  const std::uint32_t hidden = exponent == 0 ? 0U : 1U << format.fraction_bits;
  const double magnitude = std::ldexp(static_cast<double>(fraction + hidden), unit);
  return (code >> (format.exponent_bits + format.fraction_bits)) != 0 ? -magnitude : magnitude;
}

template <typename Out>
struct Narrow {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const float* in, Out* out, std::int64_t n) {
    Convert::narrow(in, out, n);
  }
};

template <typename Out>
struct ToFloat8 {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const float* in, Out* out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = float8_of<Out>(in[i], 1.0F);
    }
  }
};

template <typename In>
struct Widen {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const In* in, float* out, std::int64_t n) {
    Convert::widen(in, out, n);
  }
};

/// A body of each instruction set that this processor has.
template <typename Body, typename Signature>
std::vector<Signature*> targets() {
  using Of = Targets<Body, Signature>;
  std::vector<Signature*> found{Of::baseline};
#ifdef FASTAMP_X86_TARGETS
  if (cpu::best_target() != cpu::Target::kBaseline) {
    found.push_back(Of::avx2);
  }
  if (cpu::best_target() == cpu::Target::kAvx512) {
    found.push_back(Of::avx512);
  }
#endif
  return found;
}

/// How many blocks are left out after each one that is taken.
std::uint32_t stride_of_blocks() {
  const char* seeds = std::getenv("SEEDS");
  return seeds != nullptr && std::atoi(seeds) >= 10 ? 1U : 61U;
}

/// @param matches  (bits of the float, code) of a NaN.
template <typename Out, template <typename> typename Body, typename IsNan>
void check_all_floats(const Format& format, const IsNan& matches) {
  const auto bodies = targets<Body<Out>, void(const float*, Out*, std::int64_t)>();
  const unsigned sign_at =
      static_cast<unsigned>(format.exponent_bits) + static_cast<unsigned>(format.fraction_bits);
  std::vector<float> in(kBlock);
  std::vector<std::uint32_t> expected(kBlock);
  std::vector<Out> out(kBlock);
  for (std::uint32_t block = 0; block < (1U << 16U); block += stride_of_blocks()) {
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      const std::uint32_t bits = block * kBlock + i;
      std::memcpy(&in[i], &bits, sizeof(bits));
      expected[i] = expected_magnitude(bits, format) | ((bits >> 31U) << sign_at);
    }
    for (std::size_t target = 0; target < bodies.size(); ++target) {
      bodies[target](in.data(), out.data(), kBlock);
      for (std::uint32_t i = 0; i < kBlock; ++i) {
        const std::uint32_t bits = block * kBlock + i;
        const std::uint32_t code = out[i].x;
        const bool right = is_nan(bits) ? matches(code) : code == expected[i];
        if (!right) {
          CAPTURE(target, bits, code, expected[i]);
          REQUIRE(right);
        }
      }
    }
  }
}

template <typename In>
void check_all_codes(const Format& format, bool (*code_is_nan)(std::uint32_t)) {
  std::vector<In> in;
  for (std::uint32_t code = 0; code < (1U << 16U); ++code) {
    in.emplace_back(static_cast<std::uint16_t>(code), In::from_bits());
  }
  std::vector<float> out(in.size());
  for (auto* body : targets<Widen<In>, void(const In*, float*, std::int64_t)>()) {
    // Lengths that leave a remainder behind vectors, too.
    for (const std::size_t n : {in.size(), in.size() - 3}) {
      body(in.data(), out.data(), static_cast<std::int64_t>(n));
      for (std::uint32_t code = 0; code < n; ++code) {
        const bool infinite = (code & 0x7fffU) == format.infinity;
        const auto exact = infinite ? static_cast<double>(INFINITY) * (code >> 15U != 0 ? -1 : 1)
                                    : value_of(code, format);
        const auto value = static_cast<float>(exact);
        const bool right = code_is_nan(code) ? std::isnan(out[code])
                                             : std::memcmp(&value, &out[code], sizeof(value)) == 0;
        CAPTURE(code, out[code], value);
        if (!right) {
          REQUIRE(right);
        }
      }
    }
  }
}

// -- moments in 8 bits --------------------------------------------------------------------------

/// A code's value, from its fields.
template <typename Codes>
double moment_of(std::uint32_t code, std::uint32_t scale) {
  const std::uint32_t magnitude = code & Codes::kTop;
  const double significand = 1.0 + magnitude % 8U / 8.0;
  const int exponent = static_cast<int>(magnitude / 8U + scale) - 127;
  const double value = magnitude == 0 ? 0.0 : std::ldexp(significand, exponent);
  return Codes::kTop != 0xffU && code >= 0x80U ? -value : value;
}

/// The code of the greatest value that is not above a magnitude; 0 if there is none.
template <typename Codes>
std::uint32_t code_below(double magnitude, std::uint32_t scale) {
  if (magnitude < moment_of<Codes>(1, scale)) {
    return 0;
  }
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  const auto eighths = static_cast<std::uint32_t>(fraction * 16.0) - 8U;
  const std::uint32_t code =
      8U * static_cast<std::uint32_t>(exponent - 1 + 127 - static_cast<int>(scale)) + eighths;
  return code > Codes::kTop ? Codes::kTop : code;
}

/// Checks one float against the codes around it.
template <typename Codes>
bool encodes(float value, std::uint32_t scale, std::uint32_t noise) {
  const double magnitude = std::fabs(static_cast<double>(value));
  const bool is_first = Codes::kTop != 0xffU;
  const std::uint32_t sign = is_first && std::signbit(value) ? 0x80U : 0U;
  const std::uint32_t below = code_below<Codes>(magnitude, scale);
  if (below == 0) {  // smaller than every code but 0
    const std::uint32_t least = is_first || magnitude == 0 ? 0U : 1U;
    return Codes::nearest(value, scale) == (least | sign) &&
           Codes::stochastic(value, scale, noise) == (least | sign);
  }
  if (below == Codes::kTop) {
    return Codes::nearest(value, scale) == (below | sign) &&
           Codes::stochastic(value, scale, noise) == (below | sign);
  }
  const double low = moment_of<Codes>(below, scale);
  const double high = moment_of<Codes>(below + 1, scale);
  const double part = (magnitude - low) / (high - low);  // exact: a multiple of 2^-20
  const bool up = part > 0.5 || (part == 0.5 && below % 2 == 1);
  const bool noisy_up = part * kBlock * 16 + noise >= kBlock * 16.0;
  return Codes::nearest(value, scale) == ((below + (up ? 1U : 0U)) | sign) &&
         Codes::stochastic(value, scale, noise) == ((below + (noisy_up ? 1U : 0U)) | sign);
}

template <typename Codes>
void check_codes() {
  for (std::uint32_t scale = 0; scale < 255; ++scale) {
    for (std::uint32_t code = 0; code < 256; ++code) {
      const double exact = moment_of<Codes>(code, scale);
      const float value = Codes::decode(code, scale);
      // Scales that scale() returns reach no inf; its bits are not asked for.
      if (scale == 0 || scale + Codes::kExponents > 255U) {
        continue;
      }
      CAPTURE(scale, code);
      REQUIRE(static_cast<double>(value) == exact);
      REQUIRE(std::signbit(value) == (Codes::kTop != 0xffU && code >= 0x80U));
      REQUIRE(Codes::nearest(value, scale) == code);
    }
  }
  for (std::uint32_t code = 0; code < 256; ++code) {
    REQUIRE(std::isnan(Codes::decode(code, kNotFiniteScale)));
  }
  std::uint32_t noise = 1;
  for (std::uint32_t block = 0; block < (1U << 16U); block += stride_of_blocks()) {
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      const std::uint32_t bits = block * kBlock + i;
      if ((bits & 0x7fffffffU) >= 0x7f800000U) {
        continue;
      }
      noise = noise * 1664525U + 1013904223U;
      // As if the greatest of the group were up to 2^40 times as large.
      const std::uint32_t greater = (bits & 0x7fffffffU) + (noise % 41U << 23U);
      const std::uint32_t scale = Codes::scale(greater < 0x7f800000U ? greater : 0x7f7fffffU);
      const float value = from_bits(bits);
      if (!encodes<Codes>(value, scale, noise >> 12U)) {
        CAPTURE(bits, scale, noise >> 12U);
        REQUIRE(encodes<Codes>(value, scale, noise >> 12U));
      }
    }
  }
}

}  // namespace

TEST_CASE("every float32 to bfloat16 is the nearest, ties to even") {
  check_all_floats<c10::BFloat16, Narrow>(kBFloat16,
                                          [](std::uint32_t code) { return code == 0x7fc0U; });
}

TEST_CASE("every float32 to float16 is the nearest, ties to even") {
  check_all_floats<c10::Half, Narrow>(
      kFloat16, [](std::uint32_t code) { return (code & 0x7fffU) > 0x7c00U; });
}

TEST_CASE("every float32 to e4m3 is the nearest in its range, ties to even") {
  check_all_floats<c10::Float8_e4m3fn, ToFloat8>(
      kE4m3, [](std::uint32_t code) { return (code & 0x7fU) == 0x7fU; });
}

TEST_CASE("every float32 to e5m2 is the nearest in its range, ties to even") {
  check_all_floats<c10::Float8_e5m2, ToFloat8>(
      kE5m2, [](std::uint32_t code) { return (code & 0x7fU) > 0x7cU; });
}

TEST_CASE("every bfloat16 to float32 is exact") {
  check_all_codes<c10::BFloat16>(kBFloat16,
                                 [](std::uint32_t code) { return (code & 0x7fffU) > 0x7f80U; });
}

TEST_CASE("every float16 to float32 is exact") {
  check_all_codes<c10::Half>(kFloat16,
                             [](std::uint32_t code) { return (code & 0x7fffU) > 0x7c00U; });
}

TEST_CASE("every code of a first moment, and every float to one") {
  check_codes<FirstMomentCodes>();
}

TEST_CASE("every code of a second moment, and every float to one") {
  check_codes<SecondMomentCodes>();
}
