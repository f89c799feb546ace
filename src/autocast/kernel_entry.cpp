#include "autocast/kernel_entry.h"

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

}  // namespace fastamp::autocast
