#define FASTAMP_OPS_PART 2
#include "autocast/instantiate_ops.h"
