// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"
#include "trace/events.h"

namespace fastamp::autocast {

/// Describes to a trace an op that is about to run. Called by op kernels while traces are open.
TracedOp traced_op(OpId op, PolicyDevice device);

}  // namespace fastamp::autocast
