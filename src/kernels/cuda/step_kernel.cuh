// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA side of every fused step.
//
// Layout: dense arrays of a parameter side by side (kernels/step_entries.h). Mapping: a warp per
// run of chunks (launch_plan.h), four neighbouring elements per lane: fp32 operands move 128 bits
// at a time, 16-bit ones 64. All loads of a lane are issued before the first is used; with 1024
// threads per processor that keeps 32 KiB and more in flight. Where an address is not on such a
// boundary the lanes take single elements. Dtypes are tags of the entry, tested once per range and
// warp-uniform, so that one kernel serves all mixtures. The step counters are read by every warp
// that works on the parameter, and advanced by the last block (last_block.cuh), when all have.
//
// An op is a struct with  Element element(unsigned group, const float* steps) const,
// apply(const Element&, float grad, float& weight, float* moments), kMoments, kThreads, `groups`.

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/functors/master.h"
#include "kernels/step_entries.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <vector>

namespace fastamp::kernels::cuda {

inline constexpr int kStepVector = 4;
/// Groups whose hyperparameters travel with one launch.
inline constexpr std::size_t kLaunchGroups = std::size_t{1} << StepTag::kGroupBits;

struct alignas(16) Quad {
  std::uint32_t words[4];
};
struct alignas(8) Pair {
  std::uint32_t words[2];
};

/// Four elements as they lie in memory; 16-bit ones fill the first two words.
__device__ __forceinline__ Quad load_quad(const void* base, Storage storage, std::int64_t at) {
  Quad quad{};
  __builtin_assume(__isGlobal(base));
  if (storage == Storage::kFloat) {
    quad = *reinterpret_cast<const Quad*>(static_cast<const float*>(base) + at);
  } else {
    const auto pair = *reinterpret_cast<const Pair*>(static_cast<const std::uint16_t*>(base) + at);
    quad.words[0] = pair.words[0];
    quad.words[1] = pair.words[1];
  }
  return quad;
}

__device__ __forceinline__ float to_float(std::uint16_t bits, Storage storage) {
  return storage == Storage::kHalf
             ? static_cast<float>(c10::Half(bits, c10::Half::from_bits()))
             : static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
}

__device__ __forceinline__ std::uint16_t to_bits(float value, Storage storage) {
  return storage == Storage::kHalf ? c10::Half(value).x : c10::BFloat16(value).x;
}

__device__ __forceinline__ void widen_quad(const Quad& quad, Storage storage,
                                           float (&out)[kStepVector]) {
#pragma unroll
  for (int k = 0; k < kStepVector; ++k) {
    out[k] =
        storage == Storage::kFloat
            ? __uint_as_float(quad.words[k])
            : to_float(static_cast<std::uint16_t>(quad.words[k / 2] >> (16 * (k % 2))), storage);
  }
}

__device__ __forceinline__ void store_quad(const float (&in)[kStepVector], void* base,
                                           Storage storage, std::int64_t at) {
  __builtin_assume(__isGlobal(base));
  if (storage == Storage::kFloat) {
    Quad quad;
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      quad.words[k] = __float_as_uint(in[k]);
    }
    *reinterpret_cast<Quad*>(static_cast<float*>(base) + at) = quad;
  } else {
    Pair pair;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      pair.words[k] = to_bits(in[2 * k], storage) |
                      static_cast<std::uint32_t>(to_bits(in[2 * k + 1], storage)) << 16U;
    }
    *reinterpret_cast<Pair*>(static_cast<std::uint16_t*>(base) + at) = pair;
  }
}

__device__ __forceinline__ float load_one(const void* base, Storage storage, std::int64_t at) {
  __builtin_assume(__isGlobal(base));
  return storage == Storage::kFloat
             ? static_cast<const float*>(base)[at]
             : to_float(static_cast<const std::uint16_t*>(base)[at], storage);
}

__device__ __forceinline__ void store_one(float value, void* base, Storage storage,
                                          std::int64_t at) {
  __builtin_assume(__isGlobal(base));
  if (storage == Storage::kFloat) {
    static_cast<float*>(base)[at] = value;
  } else {
    static_cast<std::uint16_t*>(base)[at] = to_bits(value, storage);
  }
}

/// Whether every array of an entry can be moved four elements at a time.
__device__ __forceinline__ bool quad_aligned(const void* base, Storage storage) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  return address % (storage == Storage::kFloat ? 16 : 8) == 0;  // null is
}

template <typename Op>
struct StepKernel {
  static constexpr int kThreads = Op::kThreads;
  static constexpr int kMoments = Op::kMoments;

  Op op;
  GatePointers args;
  unsigned* arrivals;

  using Thread = GateValues;

  __device__ Thread begin() const { return args.read(); }
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

  /// Addresses and dtypes of the entry at hand.
  struct Arrays {
    void* grad;
    void* weight;
    void* half;
    void* moments[kMoments];
    Storage grad_storage;
    Storage half_storage;
    Storage moment_storage;
    bool follows;  ///< The weight follows `half`, which is no weight copy.
  };

  template <typename Table>
  __device__ void range(Thread& gate, const Table& table, const ChunkRange& range, int lane) const {
    const StepTag tag{packed_tag(table.packed[range.entry])};
    Arrays at;
    at.grad = table.pointer(kGrad, range.entry);
    at.weight = table.pointer(kWeight, range.entry);
    at.half = table.pointer(kHalf, range.entry);
    at.grad_storage = tag.of(kGradBits);
    at.half_storage = tag.of(kHalfBits);
    at.moment_storage = tag.of(kMomentBits);
    at.follows = at.half != nullptr && !tag.has_copy();
    bool vectors = quad_aligned(at.grad, at.grad_storage) &&
                   quad_aligned(at.weight, Storage::kFloat) &&
                   quad_aligned(at.half, at.half_storage);
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      at.moments[m] = table.pointer(kFirst + m, range.entry);
      vectors = vectors && quad_aligned(at.moments[m], at.moment_storage);
    }
    const auto element =
        op.element(tag.group(), static_cast<const float*>(table.pointer(kStep, range.entry)));
    std::int64_t from = range.begin;
    if (vectors) {
      const std::int64_t stop = range.begin + (range.end - range.begin) / kStepVector * kStepVector;
#pragma unroll 1
      for (std::int64_t i = from + lane * kStepVector; i < stop; i += kWarpSize * kStepVector) {
        four(element, gate, at, i);
      }
      from = stop;
    }
#pragma unroll 1
    for (std::int64_t i = from + lane; i < range.end; i += kWarpSize) {
      one(element, gate, at, i);
    }
  }

 private:
  template <typename Element>
  __device__ __forceinline__ void four(const Element& element, const GateValues& gate,
                                       const Arrays& at, std::int64_t i) const {
    const Quad raw_grad = load_quad(at.grad, at.grad_storage, i);
    const Quad raw_weight = load_quad(at.weight, Storage::kFloat, i);
    const Quad raw_half = at.follows ? load_quad(at.half, at.half_storage, i) : Quad{};
    Quad raw[kMoments];
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      raw[m] = at.moments[m] == nullptr ? Quad{} : load_quad(at.moments[m], at.moment_storage, i);
    }
    float grad[kStepVector];
    float weight[kStepVector];
    float moments[kMoments][kStepVector];
    widen_quad(raw_grad, at.grad_storage, grad);
    widen_quad(raw_weight, Storage::kFloat, weight);
    if (at.follows) {
      follow_params(at, raw_half, weight);
    }
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      widen_quad(raw[m], at.moment_storage, moments[m]);
    }
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      grad[k] = gate(grad[k]);
      float state[kMoments];
#pragma unroll
      for (int m = 0; m < kMoments; ++m) {
        state[m] = moments[m][k];
      }
      Op::apply(element, grad[k], weight[k], state);
#pragma unroll
      for (int m = 0; m < kMoments; ++m) {
        moments[m][k] = state[m];
      }
    }
    if (args.write_grads && gate.rewrites()) {
      store_quad(grad, at.grad, at.grad_storage, i);
    }
    if (!gate.skip) {
      store_four(weight, moments, at, i);
    }
  }

  __device__ __forceinline__ static void follow_params(const Arrays& at, const Quad& params,
                                                       float (&weight)[kStepVector]) {
    float written[kStepVector];
    widen_quad(params, at.half_storage, written);
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      const float rounded = to_float(to_bits(weight[k], at.half_storage), at.half_storage);
      weight[k] = current_weight(weight[k], rounded, written[k]);
    }
  }

  __device__ __forceinline__ static void store_four(const float (&weight)[kStepVector],
                                                    const float (&moments)[kMoments][kStepVector],
                                                    const Arrays& at, std::int64_t i) {
    store_quad(weight, at.weight, Storage::kFloat, i);
    if (at.half != nullptr) {
      store_quad(weight, at.half, at.half_storage, i);
    }
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      if (at.moments[m] != nullptr) {
        store_quad(moments[m], at.moments[m], at.moment_storage, i);
      }
    }
  }

  template <typename Element>
  __device__ __forceinline__ void one(const Element& element, const GateValues& gate,
                                      const Arrays& at, std::int64_t i) const {
    const float grad = gate(load_one(at.grad, at.grad_storage, i));
    float weight = load_one(at.weight, Storage::kFloat, i);
    if (at.follows) {
      const float rounded = to_float(to_bits(weight, at.half_storage), at.half_storage);
      weight = current_weight(weight, rounded, load_one(at.half, at.half_storage, i));
    }
    float state[kMoments];
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      state[m] = at.moments[m] == nullptr ? 0.0F : load_one(at.moments[m], at.moment_storage, i);
    }
    Op::apply(element, grad, weight, state);
    if (args.write_grads && gate.rewrites()) {
      store_one(grad, at.grad, at.grad_storage, i);
    }
    if (gate.skip) {
      return;
    }
    store_one(weight, at.weight, Storage::kFloat, i);
    if (at.half != nullptr) {
      store_one(weight, at.half, at.half_storage, i);
    }
#pragma unroll
    for (int m = 0; m < kMoments; ++m) {
      if (at.moments[m] != nullptr) {
        store_one(state[m], at.moments[m], at.moment_storage, i);
      }
    }
  }
};

}  // namespace fastamp::kernels::cuda
