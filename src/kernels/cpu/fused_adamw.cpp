// CPU kernel of fastamp::fused_adamw_.
//
// Layout and mapping: kernels/cpu/step_blocks.h. Traffic per element of an fp32 parameter: 4 bytes
// of gradient read and, unless lean, written; 8 of the parameter and 16 of the moments (24 with
// amsgrad, half with bf16 moments). Numerics: kernels/functors/adam.h.

#include "kernels/fused_adamw.h"

#include "kernels/cpu/step_blocks.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace fastamp::kernels {
namespace {

struct AdamStep {
  using Element = Adam;

  const std::vector<AdamGroup>& groups;

  Adam element(const DenseEntry& entry) const {
    return Adam::at(groups[entry.group], *static_cast<const float*>(entry.pointers[kStep]));
  }

  static FASTAMP_HOST_DEVICE void loop(const Adam& adam, const float* __restrict grad,
                                       float* __restrict weight, float* const* moments,
                                       std::int64_t n) {
    const Adam constants = adam;
    float* __restrict first = moments[0];
    float* __restrict second = moments[1];
    float* __restrict greatest = moments[2];
    if (greatest == nullptr) {
      float unused = 0.0F;
      for (std::int64_t i = 0; i < n; ++i) {
        constants.step<false>(grad[i], weight[i], first[i], second[i], unused);
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        constants.step<true>(grad[i], weight[i], first[i], second[i], greatest[i]);
      }
    }
  }
};

}  // namespace

void fused_adamw_cpu(const FusedAdamwArgs& args) {
  const auto entries = check_fused_adamw(args);
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = make_dense(entries, args.write_grads);
  const auto groups = adam_groups(args);
  const auto gate = gate_args(args.common());
  cpu::run_step(AdamStep{groups}, step, {gate.read(), gate.write_grads});
  step.copy_back();
}

}  // namespace fastamp::kernels
