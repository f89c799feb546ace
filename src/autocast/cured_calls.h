// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/boxed_arguments.h"

#include <ATen/core/function_schema.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

// What each thread remembers of calls that an op refused and then took in one dtype, so that the
// same call need not be refused again: an exception takes ten times as long as a small op.
namespace fastamp::autocast {

/// All that distinguishes one call of an op from another, but for the values of its tensors.
using CallSignature = std::vector<std::int64_t>;

/// Returns none if something has no number, such as a size that is a symbol, or if something
/// other than the op's own kernels sees the call.
std::optional<CallSignature> signature_of(const c10::FunctionSchema& schema,
                                          c10::DispatchKeySet below, BoxedArguments arguments,
                                          c10::ScalarType lower);

/// The dtype in which this thread has seen the op take such a call.
std::optional<c10::ScalarType> remembered_cure(const CallSignature& call);

void remember_cure(CallSignature call, c10::ScalarType to);

}  // namespace fastamp::autocast
