// What the in-place ops owe to autograd: nothing to differentiate, but a version to bump.
//
// Autograd keys fall through: the ops update gradients and scaler state, never a graph. (Left to
// torch's default, each call would box 10 000 tensors to find that out.) ADInplaceOrView bumps the
// version of what was mutated, so that backward notices an edited saved tensor and caches keyed on
// versions stay right.

#include "kernels/amp_args.h"
#include "kernels/fused_adamw.h"
#include "kernels/fused_sgd.h"
#include "ops/inplace.h"
#include "ops/library.h"

#include <fastamp/ops/amp_ops.h>
#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {
namespace {

using kernels::FusedAdamwArgs;
using kernels::FusedSgdArgs;
using kernels::NormArgs;
using kernels::UnscaleArgs;
using kernels::UpdateScaleArgs;

void bump_unscale(const UnscaleArgs& args) {
  bump_versions(args.grads);
  bump_version(args.found_inf);
  bump_version(args.sum_of_squares);
  bump_version(args.non_finite_counts);
}

void bump_norm(const NormArgs& args) {
  bump_version(args.found_inf);
  bump_version(args.sum_of_squares);
  bump_version(args.non_finite_counts);
  bump_version(args.clip_coef);
  bump_version(args.total_norm);
}

void bump_update_scale(const UpdateScaleArgs& args) {
  bump_version(args.scale);
  bump_version(args.growth_tracker);
  bump_version(args.hysteresis_tracker);
  bump_version(args.inv_scale);
  bump_version(args.history);
  bump_version(args.history_count);
}

void bump_sgd(const FusedSgdArgs& args) {
  bump_versions(args.params);
  bump_versions(args.momentum_buffers);
  bump_versions(args.momentum_steps);
  bump_versions(args.masters);
  bump_versions(args.shadows);
  if (args.write_grads) {
    bump_versions(args.grads);
  }
}

void bump_adamw(const FusedAdamwArgs& args) {
  bump_versions(args.params);
  bump_versions(args.exp_avgs);
  bump_versions(args.exp_avg_sqs);
  bump_versions(args.max_exp_avg_sqs);
  bump_versions(args.state_steps);
  bump_versions(args.masters);
  bump_versions(args.shadows);
  if (args.write_grads) {
    bump_versions(args.grads);
  }
}

}  // namespace

FASTAMP_KERNELS(Autograd, m) {
  for (const char* name :
       {"unscale_and_check_", "norm_and_check_", "update_scale_", "fused_sgd_", "fused_adamw_"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}

FASTAMP_KERNELS(ADInplaceOrView, m) {
  m.impl("unscale_and_check_", Inplace<UnscaleArgs, unscale_and_check_, bump_unscale>::named(
                                   "fastamp::unscale_and_check_"));
  m.impl("norm_and_check_",
         Inplace<NormArgs, norm_and_check_, bump_norm>::named("fastamp::norm_and_check_"));
  m.impl("update_scale_", Inplace<UpdateScaleArgs, update_scale_, bump_update_scale>::named(
                              "fastamp::update_scale_"));
  m.impl("fused_sgd_", Inplace<FusedSgdArgs, fused_sgd_, bump_sgd>::named("fastamp::fused_sgd_"));
  m.impl("fused_adamw_",
         Inplace<FusedAdamwArgs, fused_adamw_, bump_adamw>::named("fastamp::fused_adamw_"));
}

}  // namespace fastamp::ops
