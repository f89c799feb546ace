// SPDX-License-Identifier: Apache-2.0
#include "main.h"

#include <fastamp/autocast/registration.h>

int main(int argc, char** argv) {
  fastamp::register_kernels();  // a millisecond, once: else it is part of the first region
  register_benchmarks();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
