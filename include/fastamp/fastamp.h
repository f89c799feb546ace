// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Everything fastamp offers to C++ programs.

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/context.h>
#include <fastamp/autocast/convert.h>
#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/float8_plan.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/policy_preset.h>
#include <fastamp/autocast/registration.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/autocast/weights_changed.h>
#include <fastamp/build_info.h>
#include <fastamp/macros.h>
#include <fastamp/ops/amp_ops.h>
#include <fastamp/ops/exponents.h>
#include <fastamp/ops/fused_steps.h>
#include <fastamp/ops/number_range.h>
#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/low_precision_weights.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/agreement.h>
#include <fastamp/scaler/clip.h>
#include <fastamp/scaler/grad_scaler.h>
#include <fastamp/scaler/graphed_step.h>
#include <fastamp/scaler/inspector.h>
#include <fastamp/scaler/log_to.h>
#include <fastamp/scaler/on_skip.h>
#include <fastamp/scaler/step_guard.h>
#include <fastamp/scaler/step_guard_options.h>
#include <fastamp/version.h>
