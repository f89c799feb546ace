// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_ids.h"
#include "autocast/op_table.h"
#include "autocast/policy_device.h"

#include <fastamp/autocast/policy.h>

#include <array>
#include <string>
#include <vector>

// Ops that users added to the lists. They have no line in the op table: their kernel is boxed and
// works from the schema at run time. An id, once given to a name, is never given to another: saved
// overrides speak of ids.
namespace fastamp::autocast {

struct RegisteredOp {
  std::string name;  ///< "mylib::op" or "mylib::op.overload"
  OpCapabilities capabilities;
  std::array<OpPolicy, kNumPolicyDevices> defaults;
  bool active;  ///< false after unregister_op.
};

/// Ids given out so far, those of inactive ops included. Thread-safe, as all below.
std::size_t num_registered_ops();

RegisteredOp registered_op(OpId op);

/// The id of a name, new or old; the capabilities of an old one are replaced.
/// @throws c10::ValueError if there are no more ids.
OpId add_registered_op(const RegisteredOp& op);

/// Shows the op in the lists, with a default policy on some devices.
void activate_registered_op(OpId op, OpPolicy policy, const std::vector<PolicyDevice>& devices);

/// Takes the op out of the lists; its default policies are `pass`.
void deactivate_registered_op(OpId op);

}  // namespace fastamp::autocast
