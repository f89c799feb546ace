// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA side of every fused step.
//
// Layout: dense arrays of a parameter side by side (kernels/fused_steps.h). Mapping: a warp per
// run of chunks (launch_plan.h), four elements per lane (step_access.cuh): neighbours, so that fp32
// operands move 128 bits at a time and 16-bit ones 64, or, where an address is not on such a
// boundary, elements a warp's width apart. All loads of a lane are issued before the first is used.
// Dtypes are tags of the entry and warp-uniform, so that one kernel serves all mixtures; the usual
// mixtures have loops of their own, compiled without tests. Hyperparameters are made once for
// neighbouring ranges of a group and step count. A skipped step that writes no gradients reads
// nothing. The step counters are read by every warp that works on the parameter, and advanced by
// the last block (last_block.cuh), when all have.
//
// An op is a struct with  Element, Element element(unsigned group, float steps) const,
// apply<kUsed>(const Element&, float grad, float& weight, float* moments), which may touch kUsed
// moments, kMoments, kUsualMoments (of the usual mixtures; negative: no moments, and one loop for
// all mixtures), kKind, kThreads, `groups`. Each kind of entries (StepKind) has a kernel of its
// own: registers, and a table's bytes, are not to be paid by those who ask for none. All entries of
// the noisy kind have bf16 moments which are rounded by noise, a hash of the element's index, the
// first one if noisy_first(const Element&); it has a further list, whose "pointers" are the noise's
// origins. So has the kind of codes (step_codes.cuh), whose third moment is the list of their
// scales. The turned kind is the noisy one where an element's index is not its place in memory: a
// list more, and divisions.

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/cuda/step_access.cuh"
#include "kernels/cuda/step_codes.cuh"
#include "kernels/cuda/step_operands.cuh"
#include "kernels/functors/noise.h"
#include "kernels/functors/step_count.h"
#include "kernels/fused_steps.h"

#include <type_traits>
#include <vector>

namespace fastamp::kernels::cuda {

/// Groups whose hyperparameters travel with one launch.
inline constexpr std::size_t kLaunchGroups = std::size_t{1} << StepTag::kGroupBits;

/// Advances a counter that other threads of the block may advance, too: each of them counts.
__device__ __forceinline__ void advance(float* count) {
  auto* const bits = reinterpret_cast<unsigned*>(count);
  unsigned old = 0;
  unsigned assumed;
  do {
    assumed = old;
    old = atomicCAS(bits, assumed, bits_of(next_count(from_bits(assumed))));
  } while (old != assumed);
}

/// Advances the counters of all entries, by the threads of one block.
template <typename Table>
__device__ void advance_all(const Table& table) {
#pragma unroll 4
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < table.count;
       i += kBlockThreads) {
    auto* const count = static_cast<float*>(table.pointer(kStep, i));
    if (count != nullptr) {
      advance(count);  // parameters may share a counter, which then counts each of them
    }
  }
}

/// Rounds four elements of the m-th moment by noise.
/// @param order  Where it turns, of how elements lie.
template <bool kTurned, typename Place>
__device__ __forceinline__ void store_noisily(const float (&in)[kStepVector], void* base, int m,
                                              const Noise& noise, ElementOrder order,
                                              const Place& place) {
  // Each moment hashes anew: the hashes of one would else be kept for the next, in registers that
  // there are not.
  Noise own = noise;
  asm volatile("" : "+r"(own.start));
  std::uint16_t rounded[kStepVector];
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    const auto index = kTurned ? order.element_at(static_cast<std::uint64_t>(place.index(k)))
                               : static_cast<std::uint32_t>(place.index(k));
    const auto drawn = own.of_moment(index, static_cast<std::size_t>(m));
    rounded[k] = round_stochastically(in[k], drawn);
  }
  place.store_bits(rounded, base);
}

template <typename Op>
struct StepKernel {
  static constexpr int kThreads = Op::kThreads;
  static constexpr int kMoments = Op::kMoments;
  static constexpr bool kTurned = Op::kKind == StepKind::kTurned;
  static constexpr bool kNoisy = Op::kKind == StepKind::kNoisy || kTurned;
  static constexpr bool kCodes = Op::kKind == StepKind::kCodes;
  using Arrays = StepArrays<kMoments>;

  Op op;
  AmpStepPointers args;
  unsigned* arrivals;

  static constexpr unsigned kSteps = 1U;
  static constexpr unsigned kWritesGrads = 2U;

  struct Thread {
    AmpStepValues amp_step;
    unsigned does;   ///< kSteps and kWritesGrads: each in a register of its own is one too many.
    unsigned group;  ///< Of `element`, and
    float steps;     ///< its step count.
    typename Op::Element element;
  };

  __device__ Thread begin() const {
    const auto amp_step = args.read();
    const unsigned steps = amp_step.skip ? 0U : kSteps;
    const unsigned writes = args.write_grads && amp_step.rewrites() ? kWritesGrads : 0U;
    return {amp_step, steps | writes, ~0U, 0.0F, {}};
  }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void finish(const Table& table) const {
    if (!args.read().skip) {
      advance_all(table);
    }
  }

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const ChunkRange& range,
                        int lane) const {
    if (thread.does == 0) {
      return;
    }
    const auto* count = static_cast<const float*>(table.pointer(kStep, range.entry));
    const unsigned group = StepTag{packed_tag(table.packed[range.entry])}.group();
    prepare(thread, group, count == nullptr ? 0.0F : *count);
    const Arrays at = arrays(thread, table, range.entry);
    std::uint32_t amax = 0;
    if constexpr (!kCodes) {
      elements(thread, table, range, lane, at, amax);
    } else if (at.remainders) {
      code_groups<Mix::kAnyRemainder>(thread, at, range, lane, amax);
    } else {
      code_groups<Mix::kAny>(thread, at, range, lane, amax);
    }
    leave_amax_of(thread, table, range.entry, amax, lane);
  }

 private:
  template <typename Table>
  __device__ __forceinline__ void elements(const Thread& thread, const Table& table,
                                           const ChunkRange& range, int lane, const Arrays& at,
                                           std::uint32_t& amax) const {
    std::int64_t from = range.begin;
    const Mix mix = at.aligned() ? at.mix(Op::kUsualMoments) : Mix::kAny;
    const std::int64_t stop = range.begin + (range.end - range.begin) / kStepVector * kStepVector;
    if constexpr (Op::kUsualMoments < 0) {
      if (at.aligned()) {
        constexpr Mix kMix = Op::kKind == StepKind::kRemainders ? Mix::kAnyRemainder : Mix::kAny;
        vectors_of<kMix, false>(thread, at, from + lane * kStepVector, stop, amax);
        from = stop;
      }
    } else if (mix != Mix::kAny) {
      if (kNoisy || at.moment_storage != Storage::kFloat) {
        vectors<true>(thread, at, mix, from + lane * kStepVector, stop, amax);
      } else if constexpr (!kNoisy) {
        vectors<false>(thread, at, mix, from + lane * kStepVector, stop, amax);
      }
      from = stop;
    }
    const Arrays again = arrays(thread, table, range.entry);
    if (again.remainders) {
      others<Mix::kAnyRemainder>(thread, again, from + lane, range.end, amax);
      return;
    }
    others<Mix::kAny>(thread, again, from + lane, range.end, amax);
  }

  template <typename Table>
  __device__ __forceinline__ static void leave_amax_of(const Thread& thread, const Table& table,
                                                       std::int32_t entry, std::uint32_t amax,
                                                       int lane) {
    // Read again: no register is kept for it through the loops.
    const Arrays done = arrays(thread, table, entry);
    if (done.half_storage == Storage::kFloat8 && (thread.does & kSteps) != 0) {
      leave_amax(amax, done.half, lane);
    }
  }

  template <Mix kMix>
  __device__ __forceinline__ static void code_groups(const Thread& thread, const Arrays& at,
                                                     const ChunkRange& range, int lane,
                                                     std::uint32_t& amax) {
    const Arrays known = at.template known<kMix, false>();
    const CodeStep<Op, Arrays> step{known, thread.amp_step, thread.element,
                                    (thread.does & kSteps) != 0, (thread.does & kWritesGrads) != 0};
    step.template run<kMix>(range, lane, amax);
  }

  /// Reads the table here and now. Arguments being constant, the compiler would else read them
  /// before the powers of prepare(), and keep them through all loops: registers that there are not.
  template <typename Table>
  __device__ __forceinline__ static Arrays arrays(const Thread& thread, const Table& table,
                                                  std::int32_t entry) {
    asm volatile("" : "+r"(entry));
    const StepTag tag{packed_tag(table.packed[entry])};
    Arrays at;
    at.grad = table.pointer(kGrad, entry);
    at.weight = table.pointer(kWeight, entry);
    at.half = table.pointer(kHalf, entry);
    at.grad_storage = tag.of(kGradBits);
    at.half_storage = tag.of(kHalfBits);
    at.moment_storage = kNoisy ? Storage::kBFloat16 : tag.of(kMomentBits);
    at.follows = at.half != nullptr && !tag.has_copy();
    at.remainders = kNoisy || kCodes ? tag.has_remainder() : Op::kKind == StepKind::kRemainders;
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      at.moments[m] = table.pointer(kFirst + m, entry);
    }
    if constexpr (Op::kUsualMoments < 0) {
      at.moments[0] = nullptr;  // Known when it is compiled: registers.
    }
    if constexpr (kCodes) {
      at.group_shift = tag.group_shift();
    }
    if constexpr (kNoisy || kCodes) {
      const auto origin = reinterpret_cast<std::uint64_t>(table.pointer(kFirst + kMoments, entry));
      at.noise = Noise::at(origin, thread.steps);
    }
    if constexpr (kTurned) {
      at.order = ElementOrder::of_packed(
          reinterpret_cast<std::uint64_t>(table.pointer(kFirst + kMoments + 1, entry)));
    }
    return at;
  }

  /// Steps what vectors do not reach: elements behind the last, or all.
  template <Mix kMix>
  __device__ __forceinline__ void others(const Thread& thread, const Arrays& at, std::int64_t from,
                                         std::int64_t end, std::uint32_t& amax) const {
    const Arrays known = at.template known<kMix, false>();
#pragma unroll 1
    for (std::int64_t i = from; i < end; i += kWarpSize * kStepVector) {
      const auto left = static_cast<int>(min(end - i, std::int64_t{kWarpSize * kStepVector}));
      four<kMix>(thread, known, Apart{i, left}, amax);
    }
  }

  /// Constants: of neighbouring ranges, most have the group and the step count of the one before.
  __device__ __forceinline__ void prepare(Thread& thread, unsigned group, float steps) const {
    if (group != thread.group || steps != thread.steps) {
      thread.group = group;
      thread.steps = steps;
      thread.element = op.element(group, steps);
    }
  }

  template <bool kNarrowMoments>
  __device__ __forceinline__ void vectors(const Thread& thread, const Arrays& at, Mix mix,
                                          std::int64_t from, std::int64_t stop,
                                          std::uint32_t& amax) const {
    if constexpr (Op::kKind != StepKind::kPlain) {
      if (Op::kKind == StepKind::kRemainders || mix == Mix::kRemainder) {
        vectors_of<Mix::kRemainder, kNarrowMoments>(thread, at, from, stop, amax);
        return;
      }
    }
    if constexpr (Op::kKind != StepKind::kRemainders) {
      if (mix == Mix::kFloat) {
        vectors_of<Mix::kFloat, kNarrowMoments>(thread, at, from, stop, amax);
      } else if (mix == Mix::kCopied) {
        vectors_of<Mix::kCopied, kNarrowMoments>(thread, at, from, stop, amax);
      } else if (mix == Mix::kFloat8) {
        vectors_of<Mix::kFloat8, kNarrowMoments>(thread, at, from, stop, amax);
      } else {
        vectors_of<Mix::kMaster, kNarrowMoments>(thread, at, from, stop, amax);
      }
    }
  }

  template <Mix kMix, bool kNarrowMoments>
  __device__ __forceinline__ void vectors_of(const Thread& thread, const Arrays& at,
                                             std::int64_t from, std::int64_t stop,
                                             std::uint32_t& amax) const {
    const Arrays known = at.template known<kMix, kNarrowMoments>();
#pragma unroll 1
    for (std::int64_t i = from; i < stop; i += kWarpSize * kStepVector) {
      four<kMix>(thread, known, Neighbours{i}, amax);
    }
  }

  template <Mix kMix, typename Place>
  __device__ __forceinline__ void four(const Thread& thread, const Arrays& at, const Place& place,
                                       std::uint32_t& amax) const {
    constexpr int kUsed = kIsAny<kMix> ? kMoments : Op::kUsualMoments;
    const RawWeights raw_weights = load_weights(at, place);
    Quad raw[kUsed];
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      const bool held = !kIsAny<kMix> || at.moments[m] != nullptr;
      raw[m] = held ? place.load(at.moments[m], at.moment_storage) : Quad{};
    }
    float grad[kStepVector];
    float weight[kStepVector];
    float moments[kUsed][kStepVector];
    widen_weights<Place::kPacked>(raw_weights, at, grad, weight);
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      widen<Place::kPacked>(raw[m], at.moment_storage, moments[m]);
    }
    apply_step<Op>(thread.amp_step, thread.element, grad, weight, moments);
    if ((thread.does & kWritesGrads) != 0) {
      place.store(grad, at.grad, at.grad_storage);
    }
    if ((thread.does & kSteps) != 0) {
      store_four<kMix>(thread, weight, moments, at, place, amax);
    }
  }

  template <Mix kMix, int kUsed, typename Place>
  __device__ __forceinline__ static void store_four(const Thread& thread,
                                                    const float (&weight)[kStepVector],
                                                    const float (&moments)[kUsed][kStepVector],
                                                    const Arrays& at, const Place& place,
                                                    std::uint32_t& amax) {
    store_weights<kMix>(weight, at, place, amax);
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      if (!kIsAny<kMix> || at.moments[m] != nullptr) {
        if constexpr (kNoisy) {
          if (m > 0 || Op::noisy_first(thread.element)) {
            store_noisily<kTurned>(moments[m], at.moments[m], m, at.noise, at.order, place);
            continue;
          }
        }
        place.store(moments[m], at.moments[m], at.moment_storage);
      }
    }
  }
};

}  // namespace fastamp::kernels::cuda
