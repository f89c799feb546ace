// SPDX-License-Identifier: Apache-2.0
#include "support/needs_cuda.h"

bool fastamp::test::needs_cuda() { return FASTAMP_TEST_NEEDS_CUDA != 0; }
