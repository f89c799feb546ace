// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fastamp {

/// Policy of an op: what autocast does with its floating-point arguments before it runs.
///
/// Only tensors on the region's device with a floating dtype other than float64 are ever cast.
enum class OpPolicy : std::uint8_t {
  kPass,         ///< Nothing: the op runs with the dtypes it was given.
  kLower,        ///< Casts to the region's dtype (float16 or bfloat16).
  kLowerDense,   ///< The same, but casts to float32 if an argument is sparse.
  kFp32,         ///< Casts to float32.
  kSetOptDtype,  ///< Casts nothing; sets an absent `dtype` argument to float32.
  kAppendDtype,  ///< Casts nothing; calls the overload that takes an output dtype with
                 ///< float32.
  kPromote,      ///< Casts to the region's dtype if all arguments have it, else to float32. Of a
                 ///< registered op that writes an argument, casts the others to its dtype.
  kBanned,       ///< Refuses to run the op.
  kUnify,        ///< Nothing, unless the op refuses a mix of float16, bfloat16 and float32: then
                 ///< casts to the dtype of what the op writes, or to the region's or float32.
};

/// The policy's name as written in the op table: "pass", "lower", "fp32", ...
FASTAMP_API std::string_view to_string(OpPolicy policy);

/// The policy with this name.
/// @throws c10::ValueError, which lists the policies, if none has this name.
FASTAMP_API OpPolicy op_policy_from_string(std::string_view name);

/// One op of the table: its name and its policies now.
struct OpTableRow {
  std::string op;         ///< Name with overload as torch writes it: "mm", "softmax.int".
  OpPolicy cpu;           ///< Policy on CPU now.
  OpPolicy cuda;          ///< Policy on CUDA now.
  OpPolicy cpu_default;   ///< Policy on CPU before any edit.
  OpPolicy cuda_default;  ///< Policy on CUDA before any edit.
};

/// Every op autocast can act on, in table order, with the policies of the process; then the ops
/// that register_op() added. Thread-safe.
FASTAMP_API std::vector<OpTableRow> op_table();

/// The policy of `op` on `device` in force on this thread, OpPolicyGuard's changes included.
///
/// @param op  "conv1d", "aten::conv1d" or "conv1d.default": the default overload, where the op has
///     one, else all its overloads (softmax, pow). "conv1d.padding": this overload. "conv1d.*": all
///     overloads in the table.
/// @param device  c10::kCPU or c10::kCUDA.
/// @throws c10::ValueError for an unknown op (naming the nearest ones), another device, or a name
///     that stands for overloads with different policies.
/// Thread-safe.
FASTAMP_API OpPolicy op_policy(std::string_view op, c10::DeviceType device);

/// Changes the policy of `op`, for the whole process, from the next call of the op on.
///
/// Names are those of op_policy(); one that stands for several overloads changes them all. Without
/// `device` both CPU and CUDA change.
///
/// @throws c10::ValueError for an unknown op (naming the nearest ones) or device, or when the op
///     cannot carry the policy (set_opt_dtype needs an optional dtype argument, append_dtype an
///     overload that takes one); nothing is changed then.
/// @note The first edit of an op that torch does not autocast on that device registers a kernel: do
///     it while no other thread runs ops under autocast. Compiled graphs keep the old policy unless
///     recompiled; the Python function of this name sees to that.
FASTAMP_API void set_op_policy(std::string_view op, OpPolicy policy,
                               std::optional<c10::DeviceType> device = std::nullopt);

/// Undoes every edit made by set_op_policy.
FASTAMP_API void reset_op_policies();

/// Adds an op that is not in the table, such as one of an extension library, to the op lists.
///
/// It then has a policy like any other op: op_table() shows it, set_op_policy() and OpPolicyGuard
/// change it, reset_op_policies() brings back the policy given here. Its kernel hides an autocast
/// kernel that another library registered for the op. Registering a name again replaces its
/// policy. At most 256 names in a process.
///
/// @param name  "mylib::op" or "mylib::op.overload"; a name without overload adds all overloads
///     that can carry the policy, those that write an argument only if there are no others.
/// @param policy  Any policy but append_dtype that the schema can carry: an op that writes an
///     argument, such as "aten::index_put_", cannot be given a cast of it, and only promote casts
///     its other ones. Tensors in lists, tuples and dicts are cast; an op that takes some where
///     they would not be, such as in an argument of any type, or in dicts and tuples only, cannot
///     carry a policy that casts.
/// @param device  c10::kCPU or c10::kCUDA; both without it.
/// @throws c10::ValueError if torch knows no such op (naming the nearest), the op is in the table,
///     or it cannot carry the policy; nothing is changed then.
/// @note Registers kernels: do it while no other thread runs ops under autocast.
FASTAMP_API void register_op(const std::string& name, OpPolicy policy,
                             std::optional<c10::DeviceType> device = std::nullopt);

/// Removes an op that register_op() added from the lists; a name without overload removes all that
/// were added under it. An autocast kernel that the op had before is in force again.
/// @throws c10::ValueError if register_op() did not add it.
FASTAMP_API void unregister_op(const std::string& name);

}  // namespace fastamp
