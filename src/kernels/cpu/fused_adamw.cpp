// SPDX-License-Identifier: Apache-2.0
// CPU kernel of fastamp::fused_adamw_.
//
// Layout and mapping: kernels/cpu/step_blocks.h. Traffic per element of an fp32 parameter: 4 bytes
// of gradient read and, if write_grads, written; 8 of the parameter and 16 of the moments (24 with
// amsgrad, half with bf16 moments, 4 with those in 8 bits). Of a 16-bit parameter: 2 of gradient, 4
// of the parameter, 8 of its master or 4 of its remainder. Numerics: kernels/functors/adam.h,
// noise.h, remainder.h, moment_codes.h.

#include "kernels/cpu/step_blocks.h"
#include "kernels/fused_steps.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace fastamp::kernels {
namespace {

struct AdamLoop {
  using Element = AdamUpdate;

  const std::vector<AdamConstants>& groups;

  AdamUpdate element(std::size_t group, float steps) const {
    return AdamUpdate::at(groups[group], steps);
  }

  static bool noisy_first(const AdamUpdate& adam) { return adam.noisy_first(); }

  template <bool kWrites>
  static FASTAMP_ALWAYS_INLINE void loop(const AdamUpdate& adam, const AmpStepValues& amp_step,
                                         float* grad, float* weight, float* const* moments,
                                         std::int64_t n) {
    moments[2] != nullptr ? by_decay<kWrites, true>(adam, amp_step, grad, weight, moments, n)
                          : by_decay<kWrites, false>(adam, amp_step, grad, weight, moments, n);
  }

 private:
  // The modes become constants one by one: with choices left in the loop it stays scalar.
  template <bool kWrites, bool kAmsgrad>
  static FASTAMP_ALWAYS_INLINE void by_decay(const AdamUpdate& adam, const AmpStepValues& amp_step,
                                             float* grad, float* weight, float* const* moments,
                                             std::int64_t n) {
    adam.modes.couples ? by_end<kWrites, kAmsgrad, true>(adam, amp_step, grad, weight, moments, n)
                       : by_end<kWrites, kAmsgrad, false>(adam, amp_step, grad, weight, moments, n);
  }

  template <bool kWrites, bool kAmsgrad, bool kCouples>
  static FASTAMP_ALWAYS_INLINE void by_end(const AdamUpdate& adam, const AmpStepValues& amp_step,
                                           float* grad, float* weight, float* const* moments,
                                           std::int64_t n) {
    adam.modes.near ? run<kWrites, kAmsgrad, kCouples, true>(adam, amp_step, grad, weight,
                                                             moments[0], moments[1], moments[2], n)
                    : run<kWrites, kAmsgrad, kCouples, false>(
                          adam, amp_step, grad, weight, moments[0], moments[1], moments[2], n);
  }

  template <bool kWrites, bool kAmsgrad, bool kCouples, bool kNear>
  static FASTAMP_ALWAYS_INLINE void run(const AdamUpdate& adam, const AmpStepValues& amp_step,
                                        float* __restrict grad, float* __restrict weight,
                                        float* __restrict first, float* __restrict second,
                                        float* __restrict greatest, std::int64_t n) {
    const AdamUpdate constants = adam;
    const AmpStepValues through = amp_step;
    float unused = 0.0F;
    for (std::int64_t i = 0; i < n; ++i) {
      const float g = through(grad[i]);
      if constexpr (kWrites) {
        grad[i] = g;
      }
      constants.step<AdamOrder::kCpu>({kAmsgrad, kCouples, kNear}, g, weight[i], first[i],
                                      second[i], kAmsgrad ? greatest[i] : unused);
    }
  }
};

}  // namespace

void fused_adamw_cpu(const ops::FusedAdamwArgs& args, StepEntries entries) {
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(args.write_grads);
  const auto groups = adam_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  cpu::run_step(AdamLoop{groups}, step, {amp_step.read(), amp_step.write_grads});
  step.copy_back();
}

}  // namespace fastamp::kernels
