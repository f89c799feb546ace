// CPU kernel of fastamp::fused_sgd_.
//
// Layout and mapping: kernels/cpu/step_blocks.h. Traffic per element of an fp32 parameter: 4 bytes
// of gradient read and, unless lean, written; 8 of the parameter and 8 of the momentum buffer.
// Numerics: kernels/functors/sgd.h.

#include "kernels/fused_sgd.h"

#include "kernels/cpu/step_blocks.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace fastamp::kernels {
namespace {

struct SgdStep {
  using Element = Sgd;

  const std::vector<SgdGroup>& groups;

  Sgd element(const DenseEntry& entry) const {
    const auto* steps = static_cast<const float*>(entry.pointers[kStep]);
    return Sgd::at(groups[entry.group], steps == nullptr ? 0.0F : *steps);
  }

  static FASTAMP_HOST_DEVICE void loop(const Sgd& sgd, const float* __restrict grad,
                                       float* __restrict weight, float* const* moments,
                                       std::int64_t n) {
    const Sgd constants = sgd;
    float* __restrict buffer = moments[0];
    if (buffer == nullptr) {
      for (std::int64_t i = 0; i < n; ++i) {
        constants(grad[i], weight[i]);
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        constants(grad[i], weight[i], buffer[i]);
      }
    }
  }
};

}  // namespace

void fused_sgd_cpu(const FusedSgdArgs& args) {
  const auto entries = check_fused_sgd(args);
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = make_dense(entries, args.write_grads);
  const auto groups = sgd_groups(args);
  const auto gate = gate_args(args.common());
  cpu::run_step(SgdStep{groups}, step, {gate.read(), gate.write_grads});
  step.copy_back();
}

}  // namespace fastamp::kernels
