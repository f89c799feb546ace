// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <fastamp/autocast/policy.h>
#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

// From the names that users write to ids, or to an error that says what was meant.
namespace fastamp::autocast {

/// "aten::softmax.int"
std::string full_name(OpId op);

/// The name as users write it: without "aten::".
std::string short_name(OpId op);

/// Ids of all ops there are: the table's, then those that users registered.
std::vector<OpId> all_ops();

/// The ops that `name` stands for, as op_policy() describes it.
/// @throws c10::ValueError naming the nearest ops, if there is none.
std::vector<OpId> find_ops(const char* function, std::string_view name);

/// The policy device of a device, or both without one.
/// @throws c10::ValueError for a device other than CPU and CUDA.
std::vector<PolicyDevice> find_policy_devices(const char* function,
                                              std::optional<c10::DeviceType> device);

/// @throws c10::ValueError unless the op can have the policy.
void check_can_carry(const char* function, OpId op, OpPolicy policy);
void check_can_carry(const char* function, std::string_view op, const OpCapabilities& capabilities,
                     OpPolicy policy);

/// Refuses a call of an op whose policy is `banned`.
[[noreturn]] void throw_banned(OpId op, PolicyDevice device);

/// The names of all policies, as Python and policy files have them.
FASTAMP_API std::vector<std::string_view> policy_names();

/// op_policy_from_string() whose errors begin with `what`, such as "register_op: expected policy".
FASTAMP_API OpPolicy policy_named(const char* what, std::string_view name);

/// "a, b, c": the names of `known` nearest to `wanted`.
std::string nearest_names(std::string_view wanted, const std::vector<std::string>& known);

}  // namespace fastamp::autocast
