// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA's language and runtime, emulated.

#include "cuda_on_cpu/emulator/device_code.h"

#include <cuda_runtime_api.h>
