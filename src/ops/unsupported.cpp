// Where there is no kernel (sparse gradients, other devices) the call ends in one sentence about
// the argument, not in torch's list of backends.

#include "ops/from_args.h"
#include "ops/library.h"
#include "ops/op_checks.h"

#include <fastamp/ops/amp_ops.h>
#include <fastamp/ops/fused_steps.h>

#include <c10/util/Exception.h>
namespace fastamp::ops {
namespace {

using kernels::FusedAdamwArgs;
using kernels::FusedSgdArgs;
using kernels::NormArgs;
using kernels::UnscaleArgs;
using kernels::UpdateScaleArgs;

[[noreturn]] void refuse(const char* fn, c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, fn, ": expected tensors on cpu or, in a CUDA build, on cuda, got ", device);
}

void refuse_unscale(const UnscaleArgs& args) {
  kernels::check_unscale(args);
  refuse("unscale_and_check_", args.inv_scale.device());
}

void refuse_norm(const NormArgs& args) {
  kernels::check_norm(args);
  refuse("norm_and_check_", args.inv_scale.device());
}

void refuse_update_scale(const UpdateScaleArgs& args) {
  kernels::check_update_scale(args);
  refuse("update_scale_", args.scale.device());
}

void refuse_sgd(const FusedSgdArgs& args) {
  check_sgd(args);
  refuse("fused_sgd_", args.params[0].device());
}

void refuse_adamw(const FusedAdamwArgs& args) {
  check_adamw(args);
  refuse("fused_adamw_", args.params[0].device());
}

}  // namespace

FASTAMP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("unscale_and_check_", FromArgs<UnscaleArgs, refuse_unscale>::of(unscale_and_check_));
  m.impl("norm_and_check_", FromArgs<NormArgs, refuse_norm>::of(norm_and_check_));
  m.impl("update_scale_", FromArgs<UpdateScaleArgs, refuse_update_scale>::of(update_scale_));
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, refuse_sgd>::of(fused_sgd_));
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, refuse_adamw>::of(fused_adamw_));
}

}  // namespace fastamp::ops
