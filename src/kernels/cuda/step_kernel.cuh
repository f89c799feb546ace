// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA side of every fused step.
//
// Layout: dense arrays of a parameter side by side (kernels/step_entries.h). Mapping: a warp per
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
// moments, kMoments, kUsualMoments (of the usual mixtures), kThreads, `groups`.

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/cuda/step_access.cuh"
#include "kernels/functors/master.h"
#include "kernels/step_entries.h"

#include <type_traits>
#include <vector>

namespace fastamp::kernels::cuda {

/// Groups whose hyperparameters travel with one launch.
inline constexpr std::size_t kLaunchGroups = std::size_t{1} << StepTag::kGroupBits;

/// Whether an array can be moved four elements at a time.
__device__ __forceinline__ bool quad_aligned(const void* base, Storage storage) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  return address % (storage == Storage::kFloat ? 16 : 8) == 0;  // null is
}

/// What a loop knows of its arrays when it is compiled. All but the last have the usual moments.
enum class Mix : std::uint8_t {
  kFloat,   ///< An fp32 gradient, and no 16-bit parameter or copy.
  kCopied,  ///< An fp32 gradient and a weight copy.
  kMaster,  ///< A 16-bit gradient and a 16-bit parameter behind a master.
  kAny,
};

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
  bool follows;  ///< The weight follows `half`, which is no weight copy.

  __device__ __forceinline__ bool aligned() const {
    bool all = quad_aligned(grad, grad_storage) && quad_aligned(weight, Storage::kFloat) &&
               quad_aligned(half, half_storage);
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      all = all && quad_aligned(moments[m], moment_storage);
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
    return follows ? Mix::kMaster : Mix::kCopied;
  }

  /// The same with what a loop knows, which the compiler then knows.
  template <Mix kMix, bool kNarrowMoments>
  __device__ __forceinline__ StepArrays known() const {
    StepArrays all = *this;
    all.half_storage = narrow(half_storage);
    if constexpr (kMix != Mix::kAny) {
      all.grad_storage = kMix == Mix::kMaster ? narrow(grad_storage) : Storage::kFloat;
      all.moment_storage = kNarrowMoments ? narrow(moment_storage) : Storage::kFloat;
      all.follows = kMix == Mix::kMaster;
    }
    return all;
  }

 private:
  __device__ __forceinline__ static Storage narrow(Storage storage) {
    return storage == Storage::kHalf ? Storage::kHalf : Storage::kBFloat16;
  }
};

template <typename Op>
struct StepKernel {
  static constexpr int kThreads = Op::kThreads;
  static constexpr int kMoments = Op::kMoments;
  using Arrays = StepArrays<kMoments>;

  Op op;
  GatePointers args;
  unsigned* arrivals;

  static constexpr unsigned kSteps = 1U;
  static constexpr unsigned kWritesGrads = 2U;

  struct Thread {
    GateValues gate;
    unsigned does;   ///< kSteps and kWritesGrads: each in a register of its own is one too many.
    unsigned group;  ///< Of `element`, and
    float steps;     ///< its step count.
    typename Op::Element element;
  };

  __device__ Thread begin() const {
    const auto gate = args.read();
    const unsigned steps = gate.skip ? 0U : kSteps;
    const unsigned writes = args.write_grads && gate.rewrites() ? kWritesGrads : 0U;
    return {gate, steps | writes, ~0U, 0.0F, {}};
  }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void finish(const Table& table) const {
    if (args.read().skip) {
      return;
    }
#pragma unroll 4
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < table.count;
         i += kBlockThreads) {
      auto* const count = static_cast<float*>(table.pointer(kStep, i));
      if (count != nullptr) {
        atomicAdd(count, 1.0F);  // parameters may share a counter, which then counts each of them
      }
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
    const Arrays at = arrays(table, range.entry);
    std::int64_t from = range.begin;
    const Mix mix = at.aligned() ? at.mix(Op::kUsualMoments) : Mix::kAny;
    if (mix != Mix::kAny) {
      const std::int64_t stop = range.begin + (range.end - range.begin) / kStepVector * kStepVector;
      if (at.moment_storage == Storage::kFloat) {
        vectors<false>(thread, at, mix, from + lane * kStepVector, stop);
      } else {
        vectors<true>(thread, at, mix, from + lane * kStepVector, stop);
      }
      from = stop;
    }
    const Arrays known = arrays(table, range.entry).template known<Mix::kAny, false>();
#pragma unroll 1
    for (std::int64_t i = from + lane; i < range.end; i += kWarpSize * kStepVector) {
      const auto left = static_cast<int>(min(range.end - i, std::int64_t{kWarpSize * kStepVector}));
      four<Mix::kAny>(thread, known, Apart{i, left});
    }
  }

 private:
  /// Reads the table here and now. Arguments being constant, the compiler would else read them
  /// before the powers of prepare(), and keep them through all loops: registers that there are not.
  template <typename Table>
  __device__ __forceinline__ static Arrays arrays(const Table& table, std::int32_t entry) {
    asm volatile("" : "+r"(entry));
    const StepTag tag{packed_tag(table.packed[entry])};
    Arrays at;
    at.grad = table.pointer(kGrad, entry);
    at.weight = table.pointer(kWeight, entry);
    at.half = table.pointer(kHalf, entry);
    at.grad_storage = tag.of(kGradBits);
    at.half_storage = tag.of(kHalfBits);
    at.moment_storage = tag.of(kMomentBits);
    at.follows = at.half != nullptr && !tag.has_copy();
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      at.moments[m] = table.pointer(kFirst + m, entry);
    }
    return at;
  }

  /// Of neighbouring ranges, most have the group and the step count of the one before.
  __device__ __forceinline__ void prepare(Thread& thread, unsigned group, float steps) const {
    if (group != thread.group || steps != thread.steps) {
      thread.group = group;
      thread.steps = steps;
      thread.element = op.element(group, steps);
    }
  }

  template <bool kNarrowMoments>
  __device__ __forceinline__ void vectors(const Thread& thread, const Arrays& at, Mix mix,
                                          std::int64_t from, std::int64_t stop) const {
    if (mix == Mix::kFloat) {
      vectors_of<Mix::kFloat, kNarrowMoments>(thread, at, from, stop);
    } else if (mix == Mix::kCopied) {
      vectors_of<Mix::kCopied, kNarrowMoments>(thread, at, from, stop);
    } else {
      vectors_of<Mix::kMaster, kNarrowMoments>(thread, at, from, stop);
    }
  }

  template <Mix kMix, bool kNarrowMoments>
  __device__ __forceinline__ void vectors_of(const Thread& thread, const Arrays& at,
                                             std::int64_t from, std::int64_t stop) const {
    const Arrays known = at.template known<kMix, kNarrowMoments>();
#pragma unroll 1
    for (std::int64_t i = from; i < stop; i += kWarpSize * kStepVector) {
      four<kMix>(thread, known, Neighbours{i});
    }
  }

  template <Mix kMix, typename Place>
  __device__ __forceinline__ void four(const Thread& thread, const Arrays& at,
                                       const Place& place) const {
    constexpr int kUsed = kMix == Mix::kAny ? kMoments : Op::kUsualMoments;
    const Quad raw_grad = place.load(at.grad, at.grad_storage);
    const Quad raw_weight = place.load(at.weight, Storage::kFloat);
    const Quad raw_half = at.follows ? place.load(at.half, at.half_storage) : Quad{};
    Quad raw[kUsed];
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      const bool held = kMix != Mix::kAny || at.moments[m] != nullptr;
      raw[m] = held ? place.load(at.moments[m], at.moment_storage) : Quad{};
    }
    float grad[kStepVector];
    float weight[kStepVector];
    float moments[kUsed][kStepVector];
    widen<Place::kPacked>(raw_grad, at.grad_storage, grad);
    widen<Place::kPacked>(raw_weight, Storage::kFloat, weight);
    if (at.follows) {
      follow_params<Place::kPacked>(at, raw_half, weight);
    }
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      widen<Place::kPacked>(raw[m], at.moment_storage, moments[m]);
    }
    apply(thread, grad, weight, moments);
    if ((thread.does & kWritesGrads) != 0) {
      place.store(grad, at.grad, at.grad_storage);
    }
    if ((thread.does & kSteps) != 0) {
      store_four<kMix>(weight, moments, at, place);
    }
  }

  template <int kUsed>
  __device__ __forceinline__ static void apply(const Thread& thread, float (&grad)[kStepVector],
                                               float (&weight)[kStepVector],
                                               float (&moments)[kUsed][kStepVector]) {
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      grad[k] = thread.gate(grad[k]);
      float state[kUsed];
#pragma unroll
      for (int m = 0; m < kUsed; ++m) {
        state[m] = moments[m][k];
      }
      Op::template apply<kUsed>(thread.element, grad[k], weight[k], state);
#pragma unroll
      for (int m = 0; m < kUsed; ++m) {
        moments[m][k] = state[m];
      }
    }
  }

  template <bool kPacked>
  __device__ __forceinline__ static void follow_params(const Arrays& at, const Quad& params,
                                                       float (&weight)[kStepVector]) {
    float written[kStepVector];
    widen<kPacked>(params, at.half_storage, written);
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      const float rounded = to_float(to_bits(weight[k], at.half_storage), at.half_storage);
      weight[k] = current_weight(weight[k], rounded, written[k]);
    }
  }

  template <Mix kMix, int kUsed, typename Place>
  __device__ __forceinline__ static void store_four(const float (&weight)[kStepVector],
                                                    const float (&moments)[kUsed][kStepVector],
                                                    const Arrays& at, const Place& place) {
    place.store(weight, at.weight, Storage::kFloat);
    if (kMix == Mix::kAny ? at.half != nullptr : kMix != Mix::kFloat) {
      place.store(weight, at.half, at.half_storage);
    }
#pragma unroll
    for (int m = 0; m < kUsed; ++m) {
      if (kMix != Mix::kAny || at.moments[m] != nullptr) {
        place.store(moments[m], at.moments[m], at.moment_storage);
      }
    }
  }
};

}  // namespace fastamp::kernels::cuda
