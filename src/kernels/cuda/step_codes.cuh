// SPDX-License-Identifier: Apache-2.0
#pragma once

// Steps whose moments are codes of 8 bits (functors/moment_codes.h), for step_kernel.cuh.
//
// A warp takes 128 neighbouring elements at a time, four per lane: a group of 32, 64 or 128 is the
// elements of 8, 16 or 32 lanes, which find its greatest magnitudes by shuffles. Moments stay in
// registers between the step and their codes: one pass, 4 bytes of codes per element, and 4 of
// scales per group. Ranges begin and end with a group, since chunks are multiples of 128.

#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/step_access.cuh"
#include "kernels/cuda/step_operands.cuh"
#include "kernels/functors/amp_step_values.h"
#include "kernels/functors/bits.h"
#include "kernels/functors/moment_codes.h"
#include "kernels/functors/noise.h"

#include <cstdint>

namespace fastamp::kernels::cuda {

/// @tparam Op  Also has noisy_first(const Element&).
template <typename Op, typename Arrays>
struct CodeStep {
  const Arrays& at;
  const AmpStepValues& amp_step;
  const typename Op::Element& element;
  bool steps;
  bool writes_grads;

  /// A warp's range of a parameter.
  template <Mix kMix>
  __device__ __forceinline__ void run(const ChunkRange& range, int lane,
                                      std::uint32_t& amax) const {
    const bool aligned = at.aligned();
#pragma unroll 1
    for (std::int64_t i = range.begin; i < range.end; i += kWarpSize * kStepVector) {
      const std::int64_t own = i + lane * kStepVector;
      if (aligned) {
        four<kMix>(Neighbours{own}, own < range.end, amax);
      } else {
        four<kMix>(Beside{own}, own < range.end, amax);
      }
    }
  }

 private:
  using Moments = float[2][kStepVector];

  /// Four elements; lanes that have none take part in what the warp does together.
  template <Mix kMix, typename Place>
  __device__ __forceinline__ void four(const Place& place, bool has_any,
                                       std::uint32_t& amax) const {
    Moments moments{};
    if (has_any) {
      step<kMix>(place, moments, amax);
    }
    if (!steps) {
      return;
    }
    const unsigned lanes = (1U << at.group_shift) / kStepVector;
    const std::uint32_t first = FirstMomentCodes::scale(greatest_of(moments[0], lanes));
    const std::uint32_t second = SecondMomentCodes::scale(greatest_of(moments[1], lanes));
    // All lanes of a group have read its scales: shuffles order no memory.
    __syncwarp();
    if (has_any) {
      store(place, moments, first, second);
    }
  }

  template <Mix kMix, typename Place>
  __device__ __forceinline__ void step(const Place& place, Moments& moments,
                                       std::uint32_t& amax) const {
    const RawWeights raw = load_weights(at, place);
    const std::uint32_t first = place.load_bytes(at.moments[0]);
    const std::uint32_t second = place.load_bytes(at.moments[1]);
    const std::uint8_t* const scale = scales(place);
    float grad[kStepVector];
    float weight[kStepVector];
    decode<FirstMomentCodes>(first, scale[0], moments[0]);
    decode<SecondMomentCodes>(second, scale[1], moments[1]);
    widen_weights<Place::kPacked>(raw, at, grad, weight);
    apply_step<Op>(amp_step, element, grad, weight, moments);
    if (writes_grads) {
      place.store(grad, at.grad, at.grad_storage);
    }
    if (steps) {
      store_weights<kMix>(weight, at, place, amax);
    }
  }

  template <typename Place>
  __device__ __forceinline__ void store(const Place& place, const Moments& moments,
                                        std::uint32_t first_scale,
                                        std::uint32_t second_scale) const {
    const bool noisy_first = Op::noisy_first(element);
    std::uint32_t first = 0;
    std::uint32_t second = 0;
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      const std::uint32_t drawn = at.noise.bits(static_cast<std::uint32_t>(place.index(k)));
      const std::uint32_t code =
          noisy_first ? FirstMomentCodes::stochastic(moments[0][k], first_scale,
                                                     noise_of<FirstMomentCodes>(drawn))
                      : FirstMomentCodes::nearest(moments[0][k], first_scale);
      first |= code << (8 * k);
      second |= SecondMomentCodes::stochastic(moments[1][k], second_scale,
                                              noise_of<SecondMomentCodes>(drawn))
                << (8 * k);
    }
    place.store_bytes(first, at.moments[0]);
    place.store_bytes(second, at.moments[1]);
    if (is_first_of_group(place)) {
      std::uint8_t* const scale = scales(place);
      scale[0] = static_cast<std::uint8_t>(first_scale);
      scale[1] = static_cast<std::uint8_t>(second_scale);
    }
  }

  template <typename Place>
  __device__ __forceinline__ bool is_first_of_group(const Place& place) const {
    const auto mask = (std::uint32_t{1} << at.group_shift) - 1U;
    return (static_cast<std::uint32_t>(place.index(0)) & mask) == 0;
  }

  /// The two scales of the elements' group.
  template <typename Place>
  __device__ __forceinline__ std::uint8_t* scales(const Place& place) const {
    void* const base = at.moments[Op::kMoments - 1];
    __builtin_assume(__isGlobal(base));
    return static_cast<std::uint8_t*>(base) + (place.index(0) >> at.group_shift) * 2;
  }

  template <typename Codes>
  __device__ __forceinline__ static void decode(std::uint32_t bytes, std::uint32_t scale,
                                                float (&out)[kStepVector]) {
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      out[k] = Codes::decode((bytes >> (8 * k)) & 0xffU, scale);
    }
  }

  /// The bits of the greatest magnitude among the elements of so many lanes.
  __device__ __forceinline__ static std::uint32_t greatest_of(const float (&in)[kStepVector],
                                                              unsigned lanes) {
    std::uint32_t found = 0;
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      found = greater(found, bits_of(in[k]) & 0x7fffffffU);
    }
    for (unsigned step = lanes / 2; step > 0; step /= 2) {
      found = greater(found, __shfl_xor_sync(0xffffffffU, found, static_cast<int>(step)));
    }
    return found;
  }
};

}  // namespace fastamp::kernels::cuda
