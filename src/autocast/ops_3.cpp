// SPDX-License-Identifier: Apache-2.0
#define FASTAMP_OPS_PART 3
#include "autocast/instantiate_ops.h"
