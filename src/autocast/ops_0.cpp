#define FASTAMP_OPS_PART 0
#include "autocast/instantiate_ops.h"
