// SPDX-License-Identifier: Apache-2.0
// CPU kernel of fastamp::fused_sgd_.
//
// Layout and mapping: kernels/cpu/step_blocks.h. Traffic per element of an fp32 parameter: 4 bytes
// of gradient read and, if write_grads, written; 8 of the parameter and 8 of the momentum buffer.
// Of a 16-bit parameter: 2 of gradient, 4 of the parameter, 8 of its master or 4 of its remainder.
// Numerics: kernels/functors/sgd.h, remainder.h.

#include "kernels/cpu/step_blocks.h"
#include "kernels/fused_steps.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace fastamp::kernels {
namespace {

struct SgdLoop {
  using Element = SgdUpdate;

  const std::vector<SgdConstants>& groups;

  SgdUpdate element(std::size_t group, float steps) const {
    return SgdUpdate::at(groups[group], steps);
  }

  static bool noisy_first(const SgdUpdate& sgd) { return sgd.noisy; }

  template <bool kWrites>
  static FASTAMP_ALWAYS_INLINE void loop(const SgdUpdate& sgd, const AmpStepValues& amp_step,
                                         float* grad, float* weight, float* const* moments,
                                         std::int64_t n) {
    moments[0] == nullptr ? plain<kWrites>(sgd, amp_step, grad, weight, n)
                          : with_momentum<kWrites>(sgd, amp_step, grad, weight, moments[0], n);
  }

 private:
  template <bool kWrites>
  static FASTAMP_ALWAYS_INLINE void plain(const SgdUpdate& sgd, const AmpStepValues& amp_step,
                                          float* __restrict grad, float* __restrict weight,
                                          std::int64_t n) {
    const SgdUpdate constants = sgd;
    const AmpStepValues through = amp_step;
    for (std::int64_t i = 0; i < n; ++i) {
      const float g = through(grad[i]);
      if constexpr (kWrites) {
        grad[i] = g;
      }
      constants(g, weight[i]);
    }
  }

  template <bool kWrites>
  static FASTAMP_ALWAYS_INLINE void with_momentum(const SgdUpdate& sgd,
                                                  const AmpStepValues& amp_step,
                                                  float* __restrict grad, float* __restrict weight,
                                                  float* __restrict buffer, std::int64_t n) {
    const SgdUpdate constants = sgd;
    const AmpStepValues through = amp_step;
    for (std::int64_t i = 0; i < n; ++i) {
      const float g = through(grad[i]);
      if constexpr (kWrites) {
        grad[i] = g;
      }
      constants(g, weight[i], buffer[i]);
    }
  }
};

}  // namespace

void fused_sgd_cpu(const ops::FusedSgdArgs& args, StepEntries entries) {
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(args.write_grads);
  const auto groups = sgd_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  cpu::run_step(SgdLoop{groups}, step, {amp_step.read(), amp_step.write_grads});
  step.copy_back();
}

}  // namespace fastamp::kernels
