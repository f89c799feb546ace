// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastamp::autocast {

/// Position of each op in the op table.
enum class OpId : std::uint16_t {  // NOLINT(performance-enum-size): 216 lines and growing
#define FASTAMP_OP(op, cpu, cuda) op,
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) op,
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, Kernel) op,
#include "autocast/torch_op_table.inc"
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
};

inline constexpr std::size_t kNumOps = 0
#define FASTAMP_OP(op, cpu, cuda) +1
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) +1
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, Kernel) +1
#include "autocast/torch_op_table.inc"
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
    ;

/// Ops that users register take the ids after the table's.
inline constexpr std::size_t kMaxRegisteredOps = 256;
inline constexpr std::size_t kNumSlots = kNumOps + kMaxRegisteredOps;

}  // namespace fastamp::autocast
