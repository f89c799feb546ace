// SPDX-License-Identifier: Apache-2.0
// CUDA kernels of fastamp::muon_momentum_ and fastamp::muon_apply_.
//
// Layout: dense arrays of a matrix side by side (kernels/fused_steps.h). Mapping of the first: a
// warp per run of chunks (launch_plan.h), four elements per lane (step_access.cuh), neighbours or,
// where an address is not on a boundary of four, a warp's width apart; dtypes are tags of the entry
// and warp-uniform. The second is a step (step_kernel.cuh) whose gradients are the updates.
// Traffic per element of the first: 2 or 4 bytes of gradient read and, if write_grads, written; 8
// of the momentum buffer (4 in bfloat16); 2 or 4 of the update written. Of the second: 2 or 4 of
// the update read, 8 of the parameter, or of a 16-bit one 4 and 8 of its master or 4 of its
// remainder. A skipped step reads no buffer, and writes zeros as updates. Numerics:
// kernels/functors/muon.h, remainder.h, noise.h, compiled without contraction. Proof: executed by
// the emulator, with the bits of the CPU kernels (tests/cpp/cuda_on_cpu/test_muon.cpp).

#include "kernels/cuda/step_launch.cuh"
#include "kernels/muon.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fastamp::kernels {
namespace {

using cuda::kStepVector;

template <StepKind kKind>
struct MuonMomentumOp {
  static constexpr int kThreads = 1024;  // 64 registers each
  static constexpr bool kTurned = kKind == StepKind::kTurned;
  static constexpr bool kNoisy = kKind == StepKind::kNoisy || kTurned;

  MuonMomentumConstants groups[cuda::kLaunchGroups];
  AmpStepPointers args;
  unsigned* arrivals;

  struct Thread {
    AmpStepValues amp_step;
    bool writes_grads;
    unsigned group;  ///< Of `element`.
    MuonMomentum element;
  };

  struct Arrays {
    void* grad;
    void* buffer;
    void* update;
    Storage grad_storage;
    Storage buffer_storage;
    Storage update_storage;
    Noise noise;         ///< Of noisy ones.
    ElementOrder order;  ///< Of turned ones.

    __device__ __forceinline__ bool aligned() const {
      return cuda::quad_aligned(grad, grad_storage) && cuda::quad_aligned(buffer, buffer_storage) &&
             cuda::quad_aligned(update, update_storage);
    }
  };

  __device__ Thread begin() const {
    const auto amp_step = args.read();
    return {amp_step, args.write_grads && amp_step.rewrites(), ~0U, {}};
  }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void finish(const Table& table) const {
    if (!args.read().skip) {
      cuda::advance_all(table);
    }
  }

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const cuda::ChunkRange& range,
                        int lane) const {
    const StepTag tag{cuda::packed_tag(table.packed[range.entry])};
    if (tag.group() != thread.group) {
      thread.group = tag.group();
      thread.element = MuonMomentum::at(groups[thread.group]);
    }
    Arrays at = {table.pointer(kGrad, range.entry),
                 table.pointer(kFirst, range.entry),
                 table.pointer(kHalf, range.entry),
                 tag.of(kGradBits),
                 kNoisy ? Storage::kBFloat16 : tag.of(kMomentBits),
                 tag.of(kHalfBits),
                 {},
                 {}};
    if constexpr (kNoisy) {
      const auto origin = reinterpret_cast<std::uint64_t>(table.pointer(kFirst + 1, range.entry));
      at.noise = Noise::at(origin, *static_cast<const float*>(table.pointer(kStep, range.entry)));
    }
    if constexpr (kTurned) {
      at.order = ElementOrder::of_packed(
          reinterpret_cast<std::uint64_t>(table.pointer(kFirst + 2, range.entry)));
    }
    std::int64_t from = range.begin;
    if (at.aligned()) {
      const std::int64_t stop = range.begin + (range.end - range.begin) / kStepVector * kStepVector;
#pragma unroll 1
      for (std::int64_t i = from + lane * kStepVector; i < stop;
           i += cuda::kWarpSize * kStepVector) {
        four(thread, at, cuda::Neighbours{i});
      }
      from = stop;
    }
#pragma unroll 1
    for (std::int64_t i = from + lane; i < range.end; i += cuda::kWarpSize * kStepVector) {
      const auto left =
          static_cast<int>(min(range.end - i, std::int64_t{cuda::kWarpSize * kStepVector}));
      four(thread, at, cuda::Apart{i, left});
    }
  }

 private:
  template <typename Place>
  __device__ __forceinline__ static void four(const Thread& thread, const Arrays& at,
                                              const Place& place) {
    const bool steps = !thread.amp_step.skip;
    const bool reads = steps || thread.writes_grads;
    const cuda::Quad raw_grad = reads ? place.load(at.grad, at.grad_storage) : cuda::Quad{};
    const cuda::Quad raw_buffer = steps ? place.load(at.buffer, at.buffer_storage) : cuda::Quad{};
    float grad[kStepVector];
    float buffer[kStepVector];
    float update[kStepVector];
    cuda::widen<Place::kPacked>(raw_grad, at.grad_storage, grad);
    cuda::widen<Place::kPacked>(raw_buffer, at.buffer_storage, buffer);
#pragma unroll
    for (int k = 0; k < kStepVector; ++k) {
      grad[k] = thread.amp_step(grad[k]);
      update[k] = thread.element(grad[k], buffer[k]);
      update[k] = steps ? update[k] : 0.0F;
    }
    if (thread.writes_grads) {
      place.store(grad, at.grad, at.grad_storage);
    }
    place.store(update, at.update, at.update_storage);
    if (steps) {
      store_buffer(thread, at, buffer, place);
    }
  }

  template <typename Place>
  __device__ __forceinline__ static void store_buffer(const Thread& thread, const Arrays& at,
                                                      const float (&buffer)[kStepVector],
                                                      const Place& place) {
    if constexpr (kNoisy) {
      if (thread.element.noisy_first()) {
        cuda::store_noisily<kTurned>(buffer, at.buffer, 0, at.noise, at.order, place);
        return;
      }
    }
    place.store(buffer, at.buffer, at.buffer_storage);
  }
};

template <StepKind kKind>
void launch_momentum(const std::vector<MuonMomentumConstants>& groups, const DenseStep& step,
                     const AmpStepPointers& args) {
  if (!step.has(kKind)) {
    return;
  }
  const cuda::ZeroedWorkspace arrivals(sizeof(unsigned), at::cuda::getCurrentCUDAStream());
  for (std::size_t first = 0; first < groups.size(); first += cuda::kLaunchGroups) {
    MuonMomentumOp<kKind> op{{}, args, static_cast<unsigned*>(arrivals.get())};
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first),
                std::min(cuda::kLaunchGroups, groups.size() - first), op.groups);
    constexpr std::size_t kDepth = kFirst + 1 + cuda::further_lists(kKind);
    const auto part = cuda::entries_of_groups<kDepth, kKind>(step.entries, first);
    if (!part.empty()) {
      cuda::multi_tensor_apply(part, op);
    }
  }
}

template <StepKind kOfKind>
struct MuonApplyOp {
  using Element = MuonApply;
  static constexpr int kMoments = 1;  // None is there: the slot is null.
  static constexpr int kUsualMoments = -1;
  static constexpr StepKind kKind = kOfKind;
  static constexpr int kThreads = 1024;  // 64 registers each

  MuonApplyConstants groups[cuda::kLaunchGroups];

  __device__ MuonApply element(unsigned group, float /*steps*/) const {
    return MuonApply::at(groups[group]);
  }
  template <int kUsed>
  static __device__ __forceinline__ void apply(const MuonApply& muon, float update, float& weight,
                                               float* /*moments*/) {
    muon(update, weight);
  }
};

}  // namespace

void muon_momentum_cuda(const ops::MuonMomentumArgs& args, StepEntries entries) {
  const c10::cuda::CUDAGuard guard(args.grads[0].device());
  // The ops have no autograd kernels; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(args.write_grads);
  const auto groups = momentum_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  launch_momentum<StepKind::kPlain>(groups, step, amp_step);
  launch_momentum<StepKind::kNoisy>(groups, step, amp_step);
  launch_momentum<StepKind::kTurned>(groups, step, amp_step);
  step.copy_back();
}

void muon_apply_cuda(const ops::MuonApplyArgs& args, StepEntries entries) {
  const c10::cuda::CUDAGuard guard(args.params[0].device());
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(/*write_grads=*/false);
  const auto groups = apply_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  cuda::launch_step<MuonApplyOp<StepKind::kPlain>>(groups, step, amp_step);
  cuda::launch_step<MuonApplyOp<StepKind::kRemainders>>(groups, step, amp_step);
  step.copy_back();
}

}  // namespace fastamp::kernels
