// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU side of every fused step: walks the parameters in blocks that stay in the first cache
// level, hands fp32 arrays to an op's loop and writes back what is stored narrower.
//
// An op is a struct with
//   Element element(std::size_t group, float steps) const;
//       constants of a parameter of that group that has seen that many steps
//   template <bool kWrites> static void loop(const Element&, const AmpStepValues&, float* grad,
//                                            float* weight, float* const* moments, std::int64_t n);
//       FASTAMP_ALWAYS_INLINE; vectorised by the compiler; sends gradients through the AmpStep, and
//       leaves them so if kWrites
//   static bool noisy_first(const Element&)
//       where moments may be rounded by noise: whether first ones are, too
// Results do not depend on threads, cuts or target: each element is on its own.

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/moment_codes.h"
#include "kernels/cpu/work_partition.h"
#include "kernels/functors/float8_copy.h"
#include "kernels/functors/master.h"
#include "kernels/functors/noise.h"
#include "kernels/functors/remainder.h"
#include "kernels/functors/step_count.h"
#include "kernels/fused_steps.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

namespace fastamp::kernels::cpu {

/// 4 KiB per array; at most six arrays are converted.
inline constexpr std::int64_t kStepBlock = 1024;

/// Up to this many elements (10 to 30 bytes each) waking other threads costs more than it saves.
inline constexpr std::int64_t kStepThreadsNumel = 65536;

/// Elements [begin, begin + n) of an array in fp32: the array itself, or converted into `block`.
template <typename Convert>
FASTAMP_ALWAYS_INLINE float* load_block(void* base, Storage storage, std::int64_t begin,
                                        std::int64_t n, float* block) {
  if (storage == Storage::kFloat) {
    return static_cast<float*>(base) + begin;
  }
  if (storage == Storage::kHalf) {
    Convert::widen(static_cast<const c10::Half*>(base) + begin, block, n);
  } else {
    Convert::widen(static_cast<const c10::BFloat16*>(base) + begin, block, n);
  }
  return block;
}

/// The reverse: rounds `block` to nearest even into the array.
template <typename Convert>
FASTAMP_ALWAYS_INLINE void store_block(const float* block, void* base, Storage storage,
                                       std::int64_t begin, std::int64_t n) {
  if (storage == Storage::kFloat) {
    float* out = static_cast<float*>(base) + begin;
    if (out != block) {
      std::copy_n(block, n, out);
    }
  } else if (storage == Storage::kHalf) {
    Convert::narrow(block, static_cast<c10::Half*>(base) + begin, n);
  } else {
    Convert::narrow(block, static_cast<c10::BFloat16*>(base) + begin, n);
  }
}

/// Raises a number that other threads raise too.
inline void raise(std::uint32_t& number, std::uint32_t to) {
  const std::atomic_ref<std::uint32_t> shared(number);
  auto found = shared.load(std::memory_order_relaxed);
  while (found < to && !shared.compare_exchange_weak(found, to, std::memory_order_relaxed)) {
  }
}

/// Casts new weights into elements [begin, begin + n) of an fp8 copy, and leaves their range in its
/// header.
FASTAMP_ALWAYS_INLINE void store_float8_block(const float* weights, void* copy, std::int64_t begin,
                                              std::int64_t n) {
  Float8CopyHeader& header = *float8_header(copy);
  const float scale = inverse_of_power_of_two(header.inverse_scale);
  auto* const out = static_cast<std::uint8_t*>(copy) + begin;
  Float8Magnitudes seen{};
  for (std::int64_t i = 0; i < n; ++i) {
    seen.include(weights[i]);
    out[i] = float8_of_finite<c10::Float8_e4m3fn>(weights[i], scale).x;
  }
  raise(header.amax, seen.amax + 1);
  if (!seen.is_finite()) {
    raise(header.not_finite, 1);
  }
}

/// Stores the m-th moment of an entry.
/// @param noisy_first  Whether a first one is rounded by noise, where others are.
template <typename Convert>
FASTAMP_ALWAYS_INLINE void store_moment(const float* block, const DenseEntry& entry, std::size_t m,
                                        bool noisy_first, std::int64_t begin, std::int64_t n) {
  void* const base = entry.pointers[kFirst + m];
  if (!entry.tag.is_noisy() || (m == 0 && !noisy_first)) {
    store_block<Convert>(block, base, entry.tag.of(kMomentBits), begin, n);
    return;
  }
  const Noise noise =
      Noise::at(entry.noise_origin, *static_cast<const float*>(entry.pointers[kStep]));
  auto* const out = static_cast<c10::BFloat16*>(base) + begin;
  entry.order.turns() ? narrow_turned(block, out, n, noise, m, begin, entry.order)
                      : narrow_noisily(block, out, n, noise, m, begin);
}

template <typename Op>
FASTAMP_ALWAYS_INLINE bool has_noisy_first(const typename Op::Element& element) {
  if constexpr (requires { Op::noisy_first(element); }) {
    return Op::noisy_first(element);
  } else {
    return false;
  }
}

/// The codes of an entry's m-th moment, from element `begin` on, with which a group begins.
inline CodeBlock codes_of(const DenseEntry& entry, std::size_t m, std::int64_t begin) {
  const auto group = static_cast<std::int64_t>(std::uint64_t{1} << entry.tag.group_shift());
  return {static_cast<std::uint8_t*>(entry.pointers[kFirst + m]) + begin,
          static_cast<std::uint8_t*>(entry.pointers[kScales]) + begin / group * 2 + m, group};
}

/// The moments of a block in fp32: where they are, or made in `converted`.
template <typename Convert>
FASTAMP_ALWAYS_INLINE void load_moments(const DenseEntry& entry, std::int64_t begin, std::int64_t n,
                                        float (*converted)[kStepBlock], float** moments) {
  if (entry.tag.has_codes()) {
    load_codes<FirstMomentCodes>(codes_of(entry, 0, begin), converted[0], n);
    load_codes<SecondMomentCodes>(codes_of(entry, 1, begin), converted[1], n);
    moments[0] = converted[0];
    moments[1] = converted[1];
    return;
  }
  for (std::size_t m = 0; m < 3; ++m) {
    if (entry.pointers[kFirst + m] != nullptr) {
      moments[m] = load_block<Convert>(entry.pointers[kFirst + m], entry.tag.of(kMomentBits), begin,
                                       n, converted[m]);
    }
  }
}

/// Encodes moments into their codes and scales.
template <typename Op>
FASTAMP_ALWAYS_INLINE void store_code_moments(const typename Op::Element& element,
                                              float* const* moments, const DenseEntry& entry,
                                              std::int64_t begin, std::int64_t n) {
  if constexpr (requires { Op::noisy_first(element); }) {
    const Noise noise =
        Noise::at(entry.noise_origin, *static_cast<const float*>(entry.pointers[kStep]));
    const auto first = codes_of(entry, 0, begin);
    Op::noisy_first(element)
        ? store_codes_noisily<FirstMomentCodes>(moments[0], first, n, noise, begin)
        : store_nearest_codes<FirstMomentCodes>(moments[0], first, n);
    store_codes_noisily<SecondMomentCodes>(moments[1], codes_of(entry, 1, begin), n, noise, begin);
  }
}

/// Brings masters up to parameters that were written since the last step.
template <typename Convert, typename Half>
FASTAMP_ALWAYS_INLINE void follow_params(float* master, const Half* params, std::int64_t n) {
  alignas(64) Half narrowed[kStepBlock];
  alignas(64) float rounded[kStepBlock];
  alignas(64) float written[kStepBlock];
  Convert::narrow(master, narrowed, n);
  Convert::widen(narrowed, rounded, n);
  Convert::widen(params, written, n);
  for (std::int64_t i = 0; i < n; ++i) {
    master[i] = current_weight(master[i], rounded[i], written[i]);
  }
}

/// The masters of parameters whose remainders are stored, in `block`.
template <typename Convert, typename Half>
FASTAMP_ALWAYS_INLINE void join_remainders(const Half* params, const std::int16_t* remainders,
                                           float* block, std::int64_t n) {
  Convert::widen(params, block, n);
  for (std::int64_t i = 0; i < n; ++i) {
    block[i] = Remainder<Half>::master(block[i], remainders[i]);
  }
}

/// The reverse: rounds masters into parameters and leaves the remainders.
template <typename Convert, typename Half>
FASTAMP_ALWAYS_INLINE void split_remainders(const float* block, Half* params,
                                            std::int16_t* remainders, std::int64_t n) {
  alignas(64) float rounded[kStepBlock];
  Convert::narrow(block, params, n);
  Convert::widen(params, rounded, n);
  for (std::int64_t i = 0; i < n; ++i) {
    remainders[i] = static_cast<std::int16_t>(Remainder<Half>::of(block[i], rounded[i]));
  }
}

/// The fp32 weights of a block: where they are, or made in `block`.
template <typename Convert>
FASTAMP_ALWAYS_INLINE float* load_weights(const DenseEntry& entry, std::int64_t begin,
                                          std::int64_t n, float* block) {
  void* const params = entry.pointers[kHalf];
  const bool is_half = entry.tag.of(kHalfBits) == Storage::kHalf;
  if (entry.tag.has_remainder()) {
    const auto* remainders = static_cast<const std::int16_t*>(entry.pointers[kWeight]) + begin;
    is_half ? join_remainders<Convert>(static_cast<const c10::Half*>(params) + begin, remainders,
                                       block, n)
            : join_remainders<Convert>(static_cast<const c10::BFloat16*>(params) + begin,
                                       remainders, block, n);
    return block;
  }
  float* weights = static_cast<float*>(entry.pointers[kWeight]) + begin;
  if (params != nullptr && !entry.tag.has_copy()) {
    is_half ? follow_params<Convert>(weights, static_cast<const c10::Half*>(params) + begin, n)
            : follow_params<Convert>(weights, static_cast<const c10::BFloat16*>(params) + begin, n);
  }
  return weights;
}

/// Writes what belongs to weights after a step: remainders, and the 16-bit parameter or weight
/// copy.
template <typename Convert>
FASTAMP_ALWAYS_INLINE void store_weights(const float* weights, const DenseEntry& entry,
                                         std::int64_t begin, std::int64_t n) {
  void* const half = entry.pointers[kHalf];
  const Storage storage = entry.tag.of(kHalfBits);
  if (entry.tag.has_remainder()) {
    auto* remainders = static_cast<std::int16_t*>(entry.pointers[kWeight]) + begin;
    storage == Storage::kHalf
        ? split_remainders<Convert>(weights, static_cast<c10::Half*>(half) + begin, remainders, n)
        : split_remainders<Convert>(weights, static_cast<c10::BFloat16*>(half) + begin, remainders,
                                    n);
  } else if (half != nullptr && storage == Storage::kFloat8) {
    store_float8_block(weights, half, begin, n);
  } else if (half != nullptr) {
    store_block<Convert>(weights, half, storage, begin, n);
  }
}

/// AmpStep that all blocks of a call share.
struct BlockAmpStep {
  AmpStepValues amp_step;
  bool write_grads;
};

/// Leaves the gradients of a skipped step as the AmpStep says.
template <typename Convert>
FASTAMP_ALWAYS_INLINE void store_skipped_grads(const BlockAmpStep& call, float* grad,
                                               const DenseEntry& entry, std::int64_t begin,
                                               std::int64_t n) {
  if (!call.write_grads || !call.amp_step.rewrites()) {
    return;
  }
  const AmpStepValues amp_step = call.amp_step;
  for (std::int64_t i = 0; i < n; ++i) {
    grad[i] = amp_step(grad[i]);
  }
  store_block<Convert>(grad, entry.pointers[kGrad], entry.tag.of(kGradBits), begin, n);
}

template <typename Convert, typename Op>
FASTAMP_ALWAYS_INLINE void step_block(const BlockAmpStep& call, const typename Op::Element& element,
                                      const DenseEntry& entry, std::int64_t begin, std::int64_t n) {
  alignas(64) float grads[kStepBlock];
  alignas(64) float converted[3][kStepBlock];
  alignas(64) float joined[kStepBlock];
  const auto& at = entry.pointers;
  const Storage grad_storage = entry.tag.of(kGradBits);
  float* grad = load_block<Convert>(at[kGrad], grad_storage, begin, n, grads);
  const bool writes = call.write_grads && call.amp_step.rewrites();
  if (call.amp_step.skip) {
    store_skipped_grads<Convert>(call, grad, entry, begin, n);
    return;
  }
  float* moments[3] = {};
  load_moments<Convert>(entry, begin, n, converted, moments);
  float* const weight = load_weights<Convert>(entry, begin, n, joined);
  if (writes) {
    Op::template loop<true>(element, call.amp_step, grad, weight, moments, n);
    store_block<Convert>(grad, at[kGrad], grad_storage, begin, n);
  } else {
    Op::template loop<false>(element, call.amp_step, grad, weight, moments, n);
  }
  if (entry.tag.has_codes()) {
    store_code_moments<Op>(element, moments, entry, begin, n);
  } else if (entry.tag.of(kMomentBits) != Storage::kFloat) {
    for (std::size_t m = 0; m < 3; ++m) {
      if (moments[m] != nullptr) {
        store_moment<Convert>(moments[m], entry, m, has_noisy_first<Op>(element), begin, n);
      }
    }
  }
  store_weights<Convert>(weight, entry, begin, n);
}

template <typename Op>
struct StepBody {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const BlockAmpStep& call, const Op::Element& element,
                                        const DenseEntry& entry, std::int64_t begin,
                                        std::int64_t end) {
    for (auto i = begin; i < end; i += kStepBlock) {
      step_block<Convert, Op>(call, element, entry, i, std::min(kStepBlock, end - i));
    }
  }
};

template <typename Op>
using StepFn = void(const BlockAmpStep&, const typename Op::Element&, const DenseEntry&,
                    std::int64_t, std::int64_t);

/// Constants of the parameter at hand: reused from the last one where group and step count are the
/// same, since powers in fp64 cost more than the step of a small parameter.
template <typename Op>
class Elements {
 public:
  explicit Elements(const Op& op) : op_(op) {}

  const Op::Element& at(const DenseEntry& entry) {
    const auto* count = static_cast<const float*>(entry.pointers[kStep]);
    const float steps = count == nullptr ? 0.0F : *count;
    if (!element_ || entry.group != group_ || steps != steps_) {
      element_ = op_.element(entry.group, steps);
      group_ = entry.group;
      steps_ = steps;
    }
    return *element_;
  }

 private:
  const Op& op_;
  std::optional<typename Op::Element> element_;
  std::size_t group_ = 0;
  float steps_ = 0.0F;
};

/// Runs the op over all entries and advances the step counters unless the step is skipped.
/// @tparam Body  What is done with a part of an entry.
template <template <typename> class Body = StepBody, typename Op>
void run_step(const Op& op, const DenseStep& step, const BlockAmpStep& call) {
  std::vector<std::int64_t> numels;
  numels.reserve(step.entries.size());
  std::int64_t total = 0;
  for (const auto& entry : step.entries) {
    numels.push_back(entry.numel);
    total += entry.numel;
  }
  auto* const run = select_target<Body<Op>, StepFn<Op>>();
  const WorkPartition partition(numels);
  const auto work = [&](std::int64_t begin, std::int64_t end) {
    Elements<Op> elements{op};
    partition.visit(begin, end, [&](std::size_t i, std::int64_t first, std::int64_t last) {
      run(call, elements.at(step.entries[i]), step.entries[i], first, last);
    });
  };
  if (total <= kStepThreadsNumel) {
    work(0, partition.length());
  } else {
    at::parallel_for(0, partition.length(), kStepThreadsNumel / 2, work);
  }
  // After all of them: every part of a parameter has to see the same count.
  if (!call.amp_step.skip) {
    for (const auto& entry : step.entries) {
      if (auto* const count = static_cast<float*>(entry.pointers[kStep]); count != nullptr) {
        *count = next_count(*count);
      }
    }
  }
}

}  // namespace fastamp::kernels::cpu
