// Meta kernels: the checks of the real ones, no data. Fake tensors and torch.compile call these.

#include "ops/from_args.h"
#include "ops/library.h"
#include "ops/op_checks.h"

#include <fastamp/ops/amp_ops.h>
#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {

using kernels::FusedAdamwArgs;
using kernels::FusedSgdArgs;
using kernels::NormArgs;
using kernels::UnscaleArgs;
using kernels::UpdateScaleArgs;

FASTAMP_KERNELS(Meta, m) {
  m.impl("unscale_and_check_",
         FromArgs<UnscaleArgs, kernels::check_unscale>::of(unscale_and_check_));
  m.impl("norm_and_check_", FromArgs<NormArgs, kernels::check_norm>::of(norm_and_check_));
  m.impl("update_scale_",
         FromArgs<UpdateScaleArgs, kernels::check_update_scale>::of(update_scale_));
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, check_sgd>::of(fused_sgd_));
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, check_adamw>::of(fused_adamw_));
}

}  // namespace fastamp::ops
