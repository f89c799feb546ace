#pragma once

#include "kernels/amp_checks.h"
#include "kernels/fused_adamw.h"
#include "kernels/fused_sgd.h"

namespace fastamp::ops {

/// The checks of the fused steps for their errors alone.
inline void check_sgd(const kernels::FusedSgdArgs& args) { kernels::check_fused_sgd(args); }
inline void check_adamw(const kernels::FusedAdamwArgs& args) { kernels::check_fused_adamw(args); }

}  // namespace fastamp::ops
