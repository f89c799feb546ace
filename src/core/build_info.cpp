// SPDX-License-Identifier: Apache-2.0
#include "core/build_config.h"
#include "core/cuda_part.h"

#include <fastamp/build_info.h>
#include <fastamp/version.h>

#include <torch/version.h>

namespace fastamp {

BuildInfo build_info() {
  BuildInfo info;
  info.version = FASTAMP_VERSION;
  info.torch_version = TORCH_VERSION;
  info.cuda_version = FASTAMP_CUDA_VERSION;
  info.cuda_archs = FASTAMP_CUDA_ARCHS;
  info.compiler = FASTAMP_COMPILER;
  info.build_type = FASTAMP_BUILD_TYPE;
  return info;
}

std::string why_no_cuda_part() { return cuda_part_refusal(); }

}  // namespace fastamp
