// SPDX-License-Identifier: Apache-2.0
// CPU kernels of fastamp::muon_momentum_ and fastamp::muon_apply_.
//
// Layout and mapping: kernels/cpu/step_blocks.h. Traffic per element of the first: 2 or 4 bytes of
// gradient read and, if write_grads, written; 8 of the momentum buffer (4 in bfloat16); 2 or 4 of
// the update written. Of the second: 2 or 4 of the update read, 8 of the parameter, or of a 16-bit
// one 4 and 8 of its master or 4 of its remainder. Numerics: kernels/functors/muon.h, remainder.h.

#include "kernels/muon.h"

#include "kernels/cpu/step_blocks.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace fastamp::kernels {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): blocks of arrays

struct MomentumOp {
  using Element = MuonMomentum;

  const std::vector<MuonMomentumConstants>& groups;

  MuonMomentum element(std::size_t group, float /*steps*/) const {
    return MuonMomentum::at(groups[group]);
  }
};

FASTAMP_ALWAYS_INLINE void move_momentum(const MuonMomentum& muon, const AmpStepValues& amp_step,
                                         float* __restrict grad, float* __restrict buffer,
                                         float* __restrict update, std::int64_t n, bool writes) {
  const MuonMomentum constants = muon;
  const AmpStepValues through = amp_step;
  if (writes) {
    for (std::int64_t i = 0; i < n; ++i) {
      grad[i] = through(grad[i]);
      update[i] = constants(grad[i], buffer[i]);
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      update[i] = constants(through(grad[i]), buffer[i]);
    }
  }
}

/// An update of a skipped step is zero: what is computed of it is thrown away, but defined.
template <typename Convert>
FASTAMP_ALWAYS_INLINE void momentum_block(const BlockAmpStep& call, const MuonMomentum& muon,
                                          const DenseEntry& entry, std::int64_t begin,
                                          std::int64_t n) {
  alignas(64) float grads[kStepBlock];
  alignas(64) float buffers[kStepBlock];
  alignas(64) float updates[kStepBlock];
  const auto& at = entry.pointers;
  const Storage update_storage = entry.tag.of(kHalfBits);
  float* const grad = load_block<Convert>(at[kGrad], entry.tag.of(kGradBits), begin, n, grads);
  const bool writes = call.write_grads && call.amp_step.rewrites();
  if (call.amp_step.skip) {
    store_skipped_grads<Convert>(call, grad, entry, begin, n);
    std::fill_n(updates, n, 0.0F);
    store_block<Convert>(updates, at[kHalf], update_storage, begin, n);
    return;
  }
  const Storage moment_storage = entry.tag.of(kMomentBits);
  float* const buffer = load_block<Convert>(at[kFirst], moment_storage, begin, n, buffers);
  move_momentum(muon, call.amp_step, grad, buffer, updates, n, writes);
  if (writes) {
    store_block<Convert>(grad, at[kGrad], entry.tag.of(kGradBits), begin, n);
  }
  store_moment<Convert>(buffer, entry, 0, muon.noisy_first(), begin, n);
  store_block<Convert>(updates, at[kHalf], update_storage, begin, n);
}

template <typename Op>
struct MomentumBody {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const BlockAmpStep& call, const MuonMomentum& muon,
                                        const DenseEntry& entry, std::int64_t begin,
                                        std::int64_t end) {
    for (auto i = begin; i < end; i += kStepBlock) {
      momentum_block<Convert>(call, muon, entry, i, std::min(kStepBlock, end - i));
    }
  }
};

struct ApplyLoop {
  using Element = MuonApply;

  const std::vector<MuonApplyConstants>& groups;

  MuonApply element(std::size_t group, float /*steps*/) const {
    return MuonApply::at(groups[group]);
  }

  template <bool kWrites>
  static FASTAMP_ALWAYS_INLINE void loop(const MuonApply& muon, const AmpStepValues& /*amp_step*/,
                                         float* update, float* weight, float* const* /*moments*/,
                                         std::int64_t n) {
    apply(muon, update, weight, n);
  }

 private:
  static FASTAMP_ALWAYS_INLINE void apply(const MuonApply& muon, const float* __restrict update,
                                          float* __restrict weight, std::int64_t n) {
    const MuonApply constants = muon;
    for (std::int64_t i = 0; i < n; ++i) {
      constants(update[i], weight[i]);
    }
  }
};

}  // namespace

void muon_momentum_cpu(const ops::MuonMomentumArgs& args, StepEntries entries) {
  // The ops have no autograd kernels; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(args.write_grads);
  const auto groups = momentum_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  run_step<MomentumBody>(MomentumOp{groups}, step, {amp_step.read(), amp_step.write_grads});
  step.copy_back();
}

void muon_apply_cpu(const ops::MuonApplyArgs& args, StepEntries entries) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(/*write_grads=*/false);
  const auto groups = apply_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  run_step(ApplyLoop{groups}, step, {amp_step.read(), /*write_grads=*/false});
  step.copy_back();
}

}  // namespace fastamp::kernels
