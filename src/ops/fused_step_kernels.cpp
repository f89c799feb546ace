// Which kernel runs an optimizer step on which device.

#include "kernels/fused_adamw.h"
#include "kernels/fused_sgd.h"
#include "ops/from_args.h"

#include <fastamp/ops/fused_steps.h>

#include <torch/library.h>

namespace fastamp::ops {

using kernels::FusedAdamwArgs;
using kernels::FusedSgdArgs;

TORCH_LIBRARY_IMPL(fastamp, CPU, m) {
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, kernels::fused_sgd_cpu>::of(fused_sgd_));
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, kernels::fused_adamw_cpu>::of(fused_adamw_));
}

#ifdef FASTAMP_WITH_CUDA
TORCH_LIBRARY_IMPL(fastamp, CUDA, m) {
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, kernels::fused_sgd_cuda>::of(fused_sgd_));
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, kernels::fused_adamw_cuda>::of(fused_adamw_));
}
#endif

}  // namespace fastamp::ops
