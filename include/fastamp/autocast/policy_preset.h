// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fastamp {

/// The edits that give the ops of one device the policies of another: those by which the two
/// columns of the op table differ now, with the changes of OpPolicyGuards on this thread.
///
/// @code
///   const fastamp::OpPolicyGuard cuda_lists(fastamp::policy_preset(torch::kCUDA, torch::kCPU));
/// @endcode
///
/// @param source  The device whose policies are copied: c10::kCPU or c10::kCUDA.
/// @param device  The device that is to have them: the same two.
/// @throws c10::ValueError for another device.
/// Changes nothing. Thread-safe.
FASTAMP_API std::vector<OpPolicyEdit> policy_preset(c10::DeviceType source, c10::DeviceType device);

/// The policies of all of torch's ops under a preset; docs/policies.md describes the presets.
///
/// @code
///   const fastamp::OpPolicyGuard safest(fastamp::op_policy_preset("OD"));
/// @endcode
///
/// @param name  "torch": as the running torch. "cuda": as it does on CUDA, on the CPU as well.
///     "OD": only what torch lowers on one of the devices is in low precision. "wide": variances,
///     norms, softmax and losses in float32. "supported": products with a sparse tensor and FFTs in
///     float32. "unify": as torch, but calls that it refuses for a mix of float16, bfloat16 and
///     float32 are repeated in one dtype.
/// @param device  c10::kCPU or c10::kCUDA; both without it.
/// @throws c10::ValueError for another name or device; nothing is changed then.
/// @note All but "torch" and "cuda" register ops that are not in the op table as `pass`, "OD" about
///     165 of the 256 that a process can register: see register_op(). No policy is changed.
FASTAMP_API std::vector<OpPolicyEdit> op_policy_preset(
    std::string_view name, std::optional<c10::DeviceType> device = std::nullopt);

/// Gives ops the policies of the environment variable FASTAMP_POLICY, such as
/// "layer_norm=lower,pow=fp32", in the whole process and on both devices, as set_op_policy() does.
///
/// For a program to call at its start, if it is to obey. The library does not do so by itself: it
/// may be a part of a program whose author has not asked for that, and an error in the variable
/// could not be reported while the library is being loaded. In Python importing fastamp does it.
/// Warns if FASTAMP_POLICY_FILE is set, which C++ does not read.
/// @throws c10::ValueError for text that is something else, an op that is not in the op table
///     (naming the nearest), or a policy that it cannot carry; no policy is changed then.
FASTAMP_API void policies_from_environment();

namespace detail {
/// op_policy_preset() whose errors name another function.
FASTAMP_API std::vector<OpPolicyEdit> op_policy_preset(const char* function, std::string_view name,
                                                       std::optional<c10::DeviceType> device);
/// Splits text such as FASTAMP_POLICY's into names of ops and policies, neither of them checked.
/// Python's reader of the variable calls it, too.
/// @throws c10::ValueError for text that is something else.
FASTAMP_API std::vector<std::pair<std::string, std::string>> split_policies(
    const std::string& text);
}  // namespace detail

}  // namespace fastamp
