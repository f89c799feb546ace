// CPU kernel of fastamp::update_scale_: one scalar update, no parallelism to have.

#include "kernels/amp_checks.h"

namespace fastamp::kernels {

void update_scale_cpu(const UpdateScaleArgs& args) {
  check_update_scale(args);
  scale_update(args)();
}

}  // namespace fastamp::kernels
