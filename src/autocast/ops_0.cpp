// SPDX-License-Identifier: Apache-2.0
#define FASTAMP_OPS_PART 0
#include "autocast/instantiate_ops.h"
