// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU side of every fused step: walks the parameters in blocks that stay in the first cache
// level, hands fp32 arrays to an op's loop and writes back what is stored narrower.
//
// An op is a struct with
//   Element element(std::size_t group, float steps) const;
//       constants of a parameter of that group that has seen that many steps
//   template <bool kWrites> static void loop(const Element&, const GateValues&, float* grad,
//                                            float* weight, float* const* moments, std::int64_t n);
//       FASTAMP_ALWAYS_INLINE; vectorised by the compiler; sends gradients through the gate, and
//       leaves them so if kWrites
// Results do not depend on threads, cuts or target: each element is on its own.

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/work_partition.h"
#include "kernels/functors/master.h"
#include "kernels/step_entries.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace fastamp::kernels::cpu {

/// 4 KiB per array; at most five arrays are converted.
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

/// What all blocks of a call share.
struct BlockGate {
  GateValues gate;
  bool write_grads;
};

template <typename Convert, typename Op>
FASTAMP_ALWAYS_INLINE void step_block(const BlockGate& call, const typename Op::Element& element,
                                      const DenseEntry& entry, std::int64_t begin, std::int64_t n) {
  alignas(64) float grads[kStepBlock];
  alignas(64) float converted[3][kStepBlock];
  const auto& at = entry.pointers;
  const Storage grad_storage = entry.tag.of(kGradBits);
  float* grad = load_block<Convert>(at[kGrad], grad_storage, begin, n, grads);
  const bool writes = call.write_grads && call.gate.rewrites();
  if (call.gate.skip) {
    if (writes) {
      const GateValues gate = call.gate;
      for (std::int64_t i = 0; i < n; ++i) {
        grad[i] = gate(grad[i]);
      }
      store_block<Convert>(grad, at[kGrad], grad_storage, begin, n);
    }
    return;
  }
  const Storage storage = entry.tag.of(kMomentBits);
  float* moments[3] = {};
  for (std::size_t m = 0; m < 3; ++m) {
    if (at[kFirst + m] != nullptr) {
      moments[m] = load_block<Convert>(at[kFirst + m], storage, begin, n, converted[m]);
    }
  }
  float* weight = static_cast<float*>(at[kWeight]) + begin;
  if (at[kHalf] != nullptr && !entry.tag.has_copy()) {
    if (entry.tag.of(kHalfBits) == Storage::kHalf) {
      follow_params<Convert>(weight, static_cast<const c10::Half*>(at[kHalf]) + begin, n);
    } else {
      follow_params<Convert>(weight, static_cast<const c10::BFloat16*>(at[kHalf]) + begin, n);
    }
  }
  if (writes) {
    Op::template loop<true>(element, call.gate, grad, weight, moments, n);
    store_block<Convert>(grad, at[kGrad], grad_storage, begin, n);
  } else {
    Op::template loop<false>(element, call.gate, grad, weight, moments, n);
  }
  for (std::size_t m = 0; m < 3; ++m) {
    if (at[kFirst + m] != nullptr && storage != Storage::kFloat) {
      store_block<Convert>(moments[m], at[kFirst + m], storage, begin, n);
    }
  }
  if (at[kHalf] != nullptr) {
    store_block<Convert>(weight, at[kHalf], entry.tag.of(kHalfBits), begin, n);
  }
}

template <typename Op>
struct StepBody {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const BlockGate& call, const Op::Element& element,
                                        const DenseEntry& entry, std::int64_t begin,
                                        std::int64_t end) {
    for (auto i = begin; i < end; i += kStepBlock) {
      step_block<Convert, Op>(call, element, entry, i, std::min(kStepBlock, end - i));
    }
  }
};

template <typename Op>
using StepFn = void(const BlockGate&, const typename Op::Element&, const DenseEntry&, std::int64_t,
                    std::int64_t);

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
template <typename Op>
void run_step(const Op& op, const DenseStep& step, const BlockGate& call) {
  std::vector<std::int64_t> numels;
  numels.reserve(step.entries.size());
  std::int64_t total = 0;
  for (const auto& entry : step.entries) {
    numels.push_back(entry.numel);
    total += entry.numel;
  }
  auto* const run = select_target<StepBody<Op>, StepFn<Op>>();
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
  if (!call.gate.skip) {
    for (const auto& entry : step.entries) {
      if (auto* const count = static_cast<float*>(entry.pointers[kStep]); count != nullptr) {
        *count += 1.0F;
      }
    }
  }
}

}  // namespace fastamp::kernels::cpu
