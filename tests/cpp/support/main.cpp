// SPDX-License-Identifier: Apache-2.0
// v2 compiles itself in the one file that defines this; v3 ignores it.
#define CATCH_CONFIG_RUNNER
#include "support/catch.h"
#include "support/needs_cuda.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <iostream>

namespace {

constexpr int kSkipped = 77;  // SKIP_RETURN_CODE in cmake/FastampTest.cmake

bool has_cuda_device() {
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
         c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (fastamp::test::needs_cuda() && !has_cuda_device()) {
    std::cout << "skipped: no CUDA device\n";
    return kSkipped;
  }
  return Catch::Session().run(argc, argv);
}
