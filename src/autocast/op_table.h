// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_ids.h"
#include "autocast/policy_device.h"

#include <fastamp/autocast/policy.h>

#include <torch/library.h>

#include <array>
#include <cstdint>
#include <string>

namespace fastamp::autocast {

/// What the schema of an op allows its policy to be; fixed at compile time.
struct OpCapabilities {
  bool lower;          ///< Has a tensor argument to cast, and writes none.
  bool fp32;           ///< Can run in another dtype too: promote makes sense and, with lower, fp32.
  bool set_opt_dtype;  ///< First argument is a tensor and there is an optional dtype.
  bool append_dtype;   ///< The table names an overload that takes an output dtype.
};

/// Everything needed to register the autocast kernel of one op.
struct KernelEntry {
  const char* name;      ///< "aten::mm"
  const char* overload;  ///< "" or "int"
  OpCapabilities capabilities;
  void (*implement)(torch::Library& library, const char* qualified_name, PolicyDevice device);

  std::string qualified_name() const {
    return *overload == '\0' ? name : std::string(name) + "." + overload;
  }
};

inline constexpr std::size_t kNumKernelParts = 4;

/// The part that compiles the kernel of an op.
constexpr std::size_t part_of(OpId op) { return static_cast<std::size_t>(op) % kNumKernelParts; }

/// Fills the entries whose index is kPart modulo kNumKernelParts.
template <std::size_t kPart>
void fill_kernel_entries(std::array<KernelEntry, kNumOps>& entries);

/// One entry per line of the op table, indexed by OpId.
const std::array<KernelEntry, kNumOps>& kernel_entries();

/// Whether an op with these capabilities can have this policy.
bool can_carry(const OpCapabilities& capabilities, OpPolicy policy);

}  // namespace fastamp::autocast
