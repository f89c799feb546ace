// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a lane of a fused step moves its four elements of an array: in one access where they are
// neighbours, else a warp's width apart, so that each of its four accesses is one for the warp.
// (Where they have to be neighbours and cannot be moved at once: one by one.)
// Dtypes are tags, tested once for all four elements.

#include "kernels/cuda/launch_plan.h"
#include "kernels/functors/float8_copy.h"
#include "kernels/fused_steps.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace fastamp::kernels::cuda {

inline constexpr int kStepVector = 4;

struct alignas(16) Quad {
  std::uint32_t words[4];
};
struct alignas(8) Pair {
  std::uint32_t words[2];
};

__device__ __forceinline__ float to_float(std::uint16_t bits, Storage storage) {
  return storage == Storage::kHalf
             ? static_cast<float>(c10::Half(bits, c10::Half::from_bits()))
             : static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
}

__device__ __forceinline__ std::uint16_t to_bits(float value, Storage storage) {
  return storage == Storage::kHalf ? c10::Half(value).x : c10::BFloat16(value).x;
}

/// Element k of a quad of 16 bits each: they fill two words, or one each.
template <bool kPacked>
__device__ __forceinline__ std::uint16_t half_of(const Quad& quad, int k) {
  return static_cast<std::uint16_t>(kPacked ? quad.words[k / 2] >> (16 * (k % 2)) : quad.words[k]);
}

template <bool kPacked>
__device__ __forceinline__ void widen(const Quad& quad, Storage storage,
                                      float (&out)[kStepVector]) {
  if (storage == Storage::kFloat) {
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      out[k] = __uint_as_float(quad.words[k]);
    }
  } else if (storage == Storage::kHalf) {
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      out[k] = to_float(half_of<kPacked>(quad, k), Storage::kHalf);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      out[k] = to_float(half_of<kPacked>(quad, k), Storage::kBFloat16);
    }
  }
}

/// New weights as elements of an fp8 copy, one byte each, the first the lowest.
__device__ __forceinline__ std::uint32_t to_float8(const float (&in)[kStepVector], float scale) {
  using Format = c10::Float8_e4m3fn;
  const std::uint32_t low = float8_pair_of_finite<Format>(in[0], in[1], scale);
  return low | static_cast<std::uint32_t>(float8_pair_of_finite<Format>(in[2], in[3], scale))
                   << 16U;
}

/// Elements at, at + 1, ... of aligned arrays.
struct Neighbours {
  static constexpr bool kPacked = true;

  std::int64_t at;

  __device__ __forceinline__ static bool holds(int /*k*/) { return true; }

  __device__ __forceinline__ void store_float8(std::uint32_t bytes, void* base) const {
    store_bytes(bytes, base);
  }

  /// Four codes, one byte each, the first the lowest.
  __device__ __forceinline__ std::uint32_t load_bytes(const void* base) const {
    __builtin_assume(__isGlobal(base));
    return *reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint8_t*>(base) + at);
  }

  __device__ __forceinline__ void store_bytes(std::uint32_t bytes, void* base) const {
    __builtin_assume(__isGlobal(base));
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(base) + at) = bytes;
  }

  __device__ __forceinline__ Quad load(const void* base, Storage storage) const {
    Quad quad{};
    __builtin_assume(__isGlobal(base));
    if (storage == Storage::kFloat) {
      quad = *reinterpret_cast<const Quad*>(static_cast<const float*>(base) + at);
    } else {
      const auto pair =
          *reinterpret_cast<const Pair*>(static_cast<const std::uint16_t*>(base) + at);
      quad.words[0] = pair.words[0];
      quad.words[1] = pair.words[1];
    }
    return quad;
  }

  __device__ __forceinline__ void store(const float (&in)[kStepVector], void* base,
                                        Storage storage) const {
    __builtin_assume(__isGlobal(base));
    if (storage == Storage::kFloat) {
      Quad quad;
#pragma unroll
      for (int k = 0; k < kStepVector; ++k) {
        quad.words[k] = __float_as_uint(in[k]);
      }
      *reinterpret_cast<Quad*>(static_cast<float*>(base) + at) = quad;
    } else {
      const Pair pair =
          storage == Storage::kHalf ? packed<Storage::kHalf>(in) : packed<Storage::kBFloat16>(in);
      *reinterpret_cast<Pair*>(static_cast<std::uint16_t*>(base) + at) = pair;
    }
  }

  /// Returns where element k of a quad is.
  __device__ __forceinline__ std::int64_t index(int k) const { return at + k; }

  /// Stores 16 bits for each element.
  __device__ __forceinline__ void store_bits(const std::uint16_t (&in)[kStepVector],
                                             void* base) const {
    __builtin_assume(__isGlobal(base));
    Pair pair;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      pair.words[k] = in[2 * k] | static_cast<std::uint32_t>(in[2 * k + 1]) << 16U;
    }
    *reinterpret_cast<Pair*>(static_cast<std::uint16_t*>(base) + at) = pair;
  }

 private:
  template <Storage kStorage>
  __device__ __forceinline__ static Pair packed(const float (&in)[kStepVector]) {
    Pair pair;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      pair.words[k] = to_bits(in[2 * k], kStorage) |
                      static_cast<std::uint32_t>(to_bits(in[2 * k + 1], kStorage)) << 16U;
    }
    return pair;
  }
};

/// Elements at, at + 1, ... of arrays at any address: codes of 8 bits, whose groups are neighbours,
/// beside arrays that cannot be moved four elements at a time.
struct Beside {
  static constexpr bool kPacked = false;

  std::int64_t at;

  __device__ __forceinline__ static bool holds(int /*k*/) { return true; }

  __device__ __forceinline__ void store_float8(std::uint32_t bytes, void* base) const {
    store_bytes(bytes, base);
  }

  __device__ __forceinline__ Quad load(const void* base, Storage storage) const {
    Quad quad{};
    __builtin_assume(__isGlobal(base));
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      quad.words[k] = storage == Storage::kFloat
                          ? __float_as_uint(static_cast<const float*>(base)[at + k])
                          : static_cast<const std::uint16_t*>(base)[at + k];
    }
    return quad;
  }

  __device__ __forceinline__ void store(const float (&in)[kStepVector], void* base,
                                        Storage storage) const {
    __builtin_assume(__isGlobal(base));
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      if (storage == Storage::kFloat) {
        static_cast<float*>(base)[at + k] = in[k];
      } else {
        static_cast<std::uint16_t*>(base)[at + k] = to_bits(in[k], storage);
      }
    }
  }

  __device__ __forceinline__ std::int64_t index(int k) const { return at + k; }

  __device__ __forceinline__ void store_bits(const std::uint16_t (&in)[kStepVector],
                                             void* base) const {
    __builtin_assume(__isGlobal(base));
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      static_cast<std::uint16_t*>(base)[at + k] = in[k];
    }
  }

  /// Four codes, one byte each, the first the lowest.
  __device__ __forceinline__ std::uint32_t load_bytes(const void* base) const {
    __builtin_assume(__isGlobal(base));
    std::uint32_t bytes = 0;
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      bytes |= static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(base)[at + k])
               << (8 * k);
    }
    return bytes;
  }

  __device__ __forceinline__ void store_bytes(std::uint32_t bytes, void* base) const {
    __builtin_assume(__isGlobal(base));
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      static_cast<std::uint8_t*>(base)[at + k] = static_cast<std::uint8_t>(bytes >> (8 * k));
    }
  }
};

/// Elements at, at + 32, ... of arrays at any address, as far as there are `left`.
struct Apart {
  static constexpr bool kPacked = false;

  std::int64_t at;
  int left;

  __device__ __forceinline__ bool holds(int k) const { return k * kWarpSize < left; }

  __device__ __forceinline__ void store_float8(std::uint32_t bytes, void* base) const {
    __builtin_assume(__isGlobal(base));
    auto* to = static_cast<std::uint8_t*>(base) + at;
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      if (holds(k)) {
        to[k * kWarpSize] = static_cast<std::uint8_t>(bytes >> (8 * k));
      }
    }
  }

  __device__ __forceinline__ Quad load(const void* base, Storage storage) const {
    Quad quad{};
    __builtin_assume(__isGlobal(base));
    if (storage == Storage::kFloat) {
      const auto* from = static_cast<const float*>(base) + at;
#pragma unroll
      for (int k = 0; k < kStepVector; ++k) {
        quad.words[k] = holds(k) ? __float_as_uint(from[k * kWarpSize]) : 0U;
      }
    } else {
      const auto* from = static_cast<const std::uint16_t*>(base) + at;
#pragma unroll
      for (int k = 0; k < kStepVector; ++k) {
        quad.words[k] = holds(k) ? from[k * kWarpSize] : 0U;
      }
    }
    return quad;
  }

  __device__ __forceinline__ void store(const float (&in)[kStepVector], void* base,
                                        Storage storage) const {
    __builtin_assume(__isGlobal(base));
    if (storage == Storage::kFloat) {
      auto* to = static_cast<float*>(base) + at;
#pragma unroll
      for (int k = 0; k < kStepVector; ++k) {
        if (holds(k)) {
          to[k * kWarpSize] = in[k];
        }
      }
    } else {
      auto* to = static_cast<std::uint16_t*>(base) + at;
#pragma unroll
      for (int k = 0; k < kStepVector; ++k) {
        if (holds(k)) {
          to[k * kWarpSize] = to_bits(in[k], storage);
        }
      }
    }
  }

  __device__ __forceinline__ std::int64_t index(int k) const { return at + k * kWarpSize; }

  __device__ __forceinline__ void store_bits(const std::uint16_t (&in)[kStepVector],
                                             void* base) const {
    __builtin_assume(__isGlobal(base));
    auto* to = static_cast<std::uint16_t*>(base) + at;
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      if (holds(k)) {
        to[k * kWarpSize] = in[k];
      }
    }
  }
};

}  // namespace fastamp::kernels::cuda
