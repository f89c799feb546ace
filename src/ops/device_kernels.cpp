// Which kernel runs an op on which device.

#include "kernels/amp_args.h"
#include "kernels/fused_adamw.h"
#include "kernels/fused_sgd.h"
#include "ops/from_args.h"
#include "ops/library.h"

#include <fastamp/ops/amp_ops.h>
#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {

using kernels::FusedAdamwArgs;
using kernels::FusedSgdArgs;
using kernels::NormArgs;
using kernels::UnscaleArgs;
using kernels::UpdateScaleArgs;

FASTAMP_KERNELS(CPU, m) {
  m.impl("unscale_and_check_",
         FromArgs<UnscaleArgs, kernels::unscale_and_check_cpu>::of(unscale_and_check_));
  m.impl("norm_and_check_", FromArgs<NormArgs, kernels::norm_and_check_cpu>::of(norm_and_check_));
  m.impl("update_scale_", FromArgs<UpdateScaleArgs, kernels::update_scale_cpu>::of(update_scale_));
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, kernels::fused_sgd_cpu>::of(fused_sgd_));
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, kernels::fused_adamw_cpu>::of(fused_adamw_));
}

#ifdef FASTAMP_WITH_CUDA
FASTAMP_KERNELS(CUDA, m) {
  m.impl("unscale_and_check_",
         FromArgs<UnscaleArgs, kernels::unscale_and_check_cuda>::of(unscale_and_check_));
  m.impl("norm_and_check_", FromArgs<NormArgs, kernels::norm_and_check_cuda>::of(norm_and_check_));
  m.impl("update_scale_", FromArgs<UpdateScaleArgs, kernels::update_scale_cuda>::of(update_scale_));
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, kernels::fused_sgd_cuda>::of(fused_sgd_));
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, kernels::fused_adamw_cuda>::of(fused_adamw_));
}
#endif

}  // namespace fastamp::ops
