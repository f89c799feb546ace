// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

namespace fastamp::autocast {

/// Fills the policy table before its first use.
void ensure_policies_loaded();

/// Registers the kernel of an op that has none yet, if our kernels are registered. Called when an
/// edit gives a policy to an op that torch does not autocast.
void ensure_registered(OpId op, PolicyDevice device);

/// Undoes ensure_registered() for an op that a user registered.
void drop_registration(OpId op, PolicyDevice device);

}  // namespace fastamp::autocast
