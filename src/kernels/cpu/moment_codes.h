// SPDX-License-Identifier: Apache-2.0
#pragma once

// Blocks of moments in 8 bits to fp32 and back (functors/moment_codes.h).

#include "kernels/cpu/targets.h"
#include "kernels/functors/moment_codes.h"
#include "kernels/functors/noise.h"

#include <cstdint>

namespace fastamp::kernels::cpu {

/// The codes of one moment of a block that begins with a group.
struct CodeBlock {
  std::uint8_t* codes;
  std::uint8_t* scales;  ///< Of this moment: every other one of the parameter's.
  std::int64_t group;    ///< Elements of a group.
};

template <typename Codes>
FASTAMP_ALWAYS_INLINE void load_codes(const CodeBlock& block, float* out, std::int64_t n) {
  for (std::int64_t at = 0; at < n; at += block.group) {
    const std::uint32_t scale = block.scales[at / block.group * 2];
    const std::uint8_t* codes = block.codes + at;
    float* __restrict values = out + at;
    for (std::int64_t i = 0; i < block.group; ++i) {
      values[i] = Codes::decode(codes[i], scale);
    }
  }
}

/// @param encode  (value, scale, index in the block) to a code.
template <typename Codes, typename Encode>
FASTAMP_ALWAYS_INLINE void store_codes(const float* in, const CodeBlock& block, std::int64_t n,
                                       const Encode& encode) {
  for (std::int64_t at = 0; at < n; at += block.group) {
    const float* values = in + at;
    std::uint32_t greatest = 0;
    for (std::int64_t i = 0; i < block.group; ++i) {
      const std::uint32_t magnitude = bits_of(values[i]) & 0x7fffffffU;
      greatest = magnitude > greatest ? magnitude : greatest;
    }
    const std::uint32_t scale = Codes::scale(greatest);
    block.scales[at / block.group * 2] = static_cast<std::uint8_t>(scale);
    std::uint8_t* __restrict codes = block.codes + at;
    for (std::int64_t i = 0; i < block.group; ++i) {
      codes[i] = static_cast<std::uint8_t>(encode(values[i], scale, at + i));
    }
  }
}

/// Stores second moments, or first ones if `Codes` are theirs, by noise.
/// @param first  The index of the block's first element in its tensor.
template <typename Codes>
FASTAMP_ALWAYS_INLINE void store_codes_noisily(const float* in, const CodeBlock& block,
                                               std::int64_t n, const Noise& noise,
                                               std::int64_t first) {
  const Noise of_tensor = noise;
  const auto start = static_cast<std::uint32_t>(first);
  store_codes<Codes>(in, block, n, [=](float value, std::uint32_t scale, std::int64_t i) {
    const auto bits = of_tensor.bits(start + static_cast<std::uint32_t>(i));
    return Codes::stochastic(value, scale, noise_of<Codes>(bits));
  });
}

template <typename Codes>
FASTAMP_ALWAYS_INLINE void store_nearest_codes(const float* in, const CodeBlock& block,
                                               std::int64_t n) {
  store_codes<Codes>(in, block, n, [](float value, std::uint32_t scale, std::int64_t /*i*/) {
    return Codes::nearest(value, scale);
  });
}

}  // namespace fastamp::kernels::cpu
