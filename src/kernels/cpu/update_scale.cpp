// SPDX-License-Identifier: Apache-2.0
// CPU kernel of fastamp::update_scale_: one scalar update, no parallelism to have.

#include "kernels/amp_args.h"

namespace fastamp::kernels {

void update_scale_cpu(const UpdateScaleArgs& args) { scale_update(args)(); }

}  // namespace fastamp::kernels
