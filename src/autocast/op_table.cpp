// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_table.h"

namespace fastamp::autocast {

template <>
void fill_kernel_entries<0>(std::array<KernelEntry, kNumOps>& entries);
template <>
void fill_kernel_entries<1>(std::array<KernelEntry, kNumOps>& entries);
template <>
void fill_kernel_entries<2>(std::array<KernelEntry, kNumOps>& entries);
template <>
void fill_kernel_entries<3>(std::array<KernelEntry, kNumOps>& entries);

const std::array<KernelEntry, kNumOps>& kernel_entries() {
  static const auto entries = [] {
    std::array<KernelEntry, kNumOps> table{};
    fill_kernel_entries<0>(table);
    fill_kernel_entries<1>(table);
    fill_kernel_entries<2>(table);
    fill_kernel_entries<3>(table);
    return table;
  }();
  return entries;
}

bool can_carry(const OpCapabilities& capabilities, OpPolicy policy) {
  switch (policy) {
    case OpPolicy::kPass:
    case OpPolicy::kBanned:
      return true;
    case OpPolicy::kLower:
      return capabilities.lower;
    case OpPolicy::kFp32:
      return capabilities.lower && capabilities.fp32;
    case OpPolicy::kPromote:
      return capabilities.fp32;
    case OpPolicy::kSetOptDtype:
      return capabilities.set_opt_dtype;
    case OpPolicy::kAppendDtype:
      return capabilities.append_dtype;
  }
  return false;
}

}  // namespace fastamp::autocast
