// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a lane of a fused step holds of its four elements: where the arrays of their parameter are
// and of which dtypes, and how weights come from them and go back, with masters, remainders and
// copies.

#include "kernels/cuda/step_access.cuh"
#include "kernels/functors/amp_step_values.h"
#include "kernels/functors/float8_copy.h"
#include "kernels/functors/master.h"
#include "kernels/functors/noise.h"
#include "kernels/functors/remainder.h"
#include "kernels/fused_steps.h"

#include <cstdint>

namespace fastamp::kernels::cuda {

/// Whether an array can be moved four elements at a time.
__device__ __forceinline__ bool quad_aligned(const void* base, Storage storage) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  const unsigned bytes = storage == Storage::kFloat ? 16 : storage == Storage::kFloat8 ? 4 : 8;
  return address % bytes == 0;  // null is
}

/// Traits that a loop knows of its arrays when compiled. All but the last two: the usual moments.
enum class Mix : std::uint8_t {
  kFloat,         ///< An fp32 gradient, and no 16-bit parameter or copy.
  kCopied,        ///< An fp32 gradient and a 16-bit weight copy.
  kFloat8,        ///< An fp32 gradient and an fp8 weight copy.
  kMaster,        ///< A 16-bit gradient and a 16-bit parameter behind a master.
  kRemainder,     ///< A 16-bit gradient and a 16-bit parameter with its remainder.
  kAny,           ///< Anything but remainders.
  kAnyRemainder,  ///< Anything with remainders.
};

template <Mix kMix>
inline constexpr bool kIsAny = kMix == Mix::kAny || kMix == Mix::kAnyRemainder;

/// Addresses and dtypes of an entry.
template <int kMoments>
struct StepArrays {
  void* grad;
  void* weight;
  void* half;
  void* moments[kMoments];
  Storage grad_storage;
  Storage half_storage;
  Storage moment_storage;
  bool follows;          ///< The weight follows `half`, which is no weight copy.
  bool remainders;       ///< `weight` holds the remainders of `half`, which the weight follows.
  Noise noise;           ///< With a noisy op, or one of codes.
  ElementOrder order;    ///< With a noisy op whose entries are turned.
  unsigned group_shift;  ///< Of codes: the logarithm of how many share a scale.

  __device__ __forceinline__ bool aligned() const {
    bool all = quad_aligned(grad, grad_storage) && quad_aligned(weight, weight_storage()) &&
               quad_aligned(half, half_storage);
    // The last array of codes is that of their scales, which are moved byte by byte.
    const int moved = moment_storage == Storage::kFloat8 ? kMoments - 1 : kMoments;
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      all = all && (m >= moved || quad_aligned(moments[m], moment_storage));
    }
    return all;
  }

  __device__ __forceinline__ Mix mix(int usual_moments) const {
    bool usual = true;
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      usual = usual && (moments[m] != nullptr) == (m < usual_moments);
    }
    const bool wide = grad_storage == Storage::kFloat;
    if (!usual || wide == follows) {
      return Mix::kAny;
    }
    if (half == nullptr) {
      return Mix::kFloat;
    }
    if (!follows) {
      return half_storage == Storage::kFloat8 ? Mix::kFloat8 : Mix::kCopied;
    }
    return remainders ? Mix::kRemainder : Mix::kMaster;
  }

  /// Width of elements of `weight`: remainders are moved as any 16 bits.
  __device__ __forceinline__ Storage weight_storage() const {
    return remainders ? Storage::kHalf : Storage::kFloat;
  }

  /// Does so with what a loop knows, which the compiler then knows.
  template <Mix kMix, bool kNarrowMoments>
  __device__ __forceinline__ StepArrays known() const {
    StepArrays all = *this;
    if constexpr (kMix == Mix::kFloat8) {
      all.half_storage = Storage::kFloat8;
    } else if (kMix != Mix::kAny || half_storage != Storage::kFloat8) {
      all.half_storage = narrow(half_storage);
    }
    if constexpr (kIsAny<kMix>) {
      all.remainders = kMix == Mix::kAnyRemainder;
      all.follows = follows || all.remainders;
    } else {
      constexpr bool kFollows = kMix == Mix::kMaster || kMix == Mix::kRemainder;
      all.grad_storage = kFollows ? narrow(grad_storage) : Storage::kFloat;
      all.moment_storage = kNarrowMoments ? narrow(moment_storage) : Storage::kFloat;
      all.follows = kFollows;
      all.remainders = kMix == Mix::kRemainder;
    }
    return all;
  }

 private:
  __device__ __forceinline__ static Storage narrow(Storage storage) {
    return storage == Storage::kHalf ? Storage::kHalf : Storage::kBFloat16;
  }
};

__device__ __forceinline__ std::uint32_t greater(std::uint32_t a, std::uint32_t b) {
  return a > b ? a : b;
}

/// Notes in the header of an fp8 copy what a warp has written.
__device__ __forceinline__ void leave_amax(std::uint32_t amax, void* copy, int lane) {
  constexpr unsigned kAll = 0xffffffffU;
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    amax = greater(amax, __shfl_xor_sync(kAll, amax, step));
  }
  if (lane == 0) {
    atomicMax(&float8_header(copy)->amax, amax + 1);
  }
}

template <bool kPacked, typename Arrays>
__device__ __forceinline__ void follow_params(const Arrays& at, const Quad& params,
                                              float (&weight)[kStepVector]) {
  float written[kStepVector];
  widen<kPacked>(params, at.half_storage, written);
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    const float rounded = to_float(to_bits(weight[k], at.half_storage), at.half_storage);
    weight[k] = current_weight(weight[k], rounded, written[k]);
  }
}

template <bool kPacked, typename Arrays>
__device__ __forceinline__ void join_remainders(const Arrays& at, const Quad& params,
                                                const Quad& remainders,
                                                float (&weight)[kStepVector]) {
  widen<kPacked>(params, at.half_storage, weight);
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    const auto remainder = static_cast<std::int16_t>(half_of<kPacked>(remainders, k));
    weight[k] = at.half_storage == Storage::kHalf
                    ? Remainder<c10::Half>::master(weight[k], remainder)
                    : Remainder<c10::BFloat16>::master(weight[k], remainder);
  }
}

/// A gradient, weights and 16-bit parameters as they were loaded.
struct RawWeights {
  Quad grad;
  Quad weight;
  Quad half;
};

template <typename Arrays, typename Place>
__device__ __forceinline__ RawWeights load_weights(const Arrays& at, const Place& place) {
  return {place.load(at.grad, at.grad_storage), place.load(at.weight, at.weight_storage()),
          at.follows ? place.load(at.half, at.half_storage) : Quad{}};
}

template <bool kPacked, typename Arrays>
__device__ __forceinline__ void widen_weights(const RawWeights& raw, const Arrays& at,
                                              float (&grad)[kStepVector],
                                              float (&weight)[kStepVector]) {
  widen<kPacked>(raw.grad, at.grad_storage, grad);
  if (at.remainders) {
    join_remainders<kPacked>(at, raw.half, raw.weight, weight);
  } else {
    widen<kPacked>(raw.weight, Storage::kFloat, weight);
    if (at.follows) {
      follow_params<kPacked>(at, raw.half, weight);
    }
  }
}

/// Sends gradients through the AmpStep and steps weights and moments.
template <typename Op, int kUsed>
__device__ __forceinline__ void apply_step(const AmpStepValues& amp_step,
                                           const typename Op::Element& element,
                                           float (&grad)[kStepVector], float (&weight)[kStepVector],
                                           float (&moments)[kUsed][kStepVector]) {
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    grad[k] = amp_step(grad[k]);
    float state[kUsed];
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      state[m] = moments[m][k];
    }
    Op::template apply<kUsed>(element, grad[k], weight[k], state);
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      moments[m][k] = state[m];
    }
  }
}

template <typename Arrays, typename Place>
__device__ __forceinline__ void store_remainders(const float (&weight)[kStepVector],
                                                 const Arrays& at, const Place& place) {
  std::uint16_t params[kStepVector];
  std::uint16_t remainders[kStepVector];
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    params[k] = to_bits(weight[k], at.half_storage);
    const float rounded = to_float(params[k], at.half_storage);
    const std::int32_t remainder = at.half_storage == Storage::kHalf
                                       ? Remainder<c10::Half>::of(weight[k], rounded)
                                       : Remainder<c10::BFloat16>::of(weight[k], rounded);
    remainders[k] = static_cast<std::uint16_t>(remainder);
  }
  place.store_bits(params, at.half);
  place.store_bits(remainders, at.weight);
}

/// The scale is in the header, whose line stays in the cache: no register is kept for it.
template <typename Place>
__device__ __forceinline__ void store_float8(const float (&weight)[kStepVector], void* copy,
                                             const Place& place, std::uint32_t& amax) {
  Float8CopyHeader* const header = float8_header(copy);
  Float8Magnitudes own{};
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    own.include(place.holds(k) ? weight[k] : 0.0F);
  }
  amax = greater(amax, own.amax);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  // A conversion without an instruction for it would spill, and there are no products in fp8
  // here: the refresh casts the weights.
  atomicMax(&header->not_finite, 1U);
#else
  if (!own.is_finite()) {
    atomicMax(&header->not_finite, 1U);
  }
  place.store_float8(to_float8(weight, inverse_of_power_of_two(header->inverse_scale)), copy);
#endif
}

/// Stores weights, and remainders or 16-bit parameters or copies.
/// @param amax  Raised to the greatest magnitude that went to an fp8 copy.
template <Mix kMix, typename Arrays, typename Place>
__device__ __forceinline__ void store_weights(const float (&weight)[kStepVector], const Arrays& at,
                                              const Place& place, std::uint32_t& amax) {
  if (at.remainders) {
    store_remainders(weight, at, place);
    return;
  }
  place.store(weight, at.weight, Storage::kFloat);
  if (kMix == Mix::kAny ? at.half != nullptr : kMix != Mix::kFloat) {
    if (at.half_storage == Storage::kFloat8) {
      store_float8(weight, at.half, place, amax);
    } else {
      place.store(weight, at.half, at.half_storage);
    }
  }
}

}  // namespace fastamp::kernels::cuda
