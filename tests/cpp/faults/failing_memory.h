// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace fastamp::test {

/// Lets one allocation of this thread fail: operator new, which all of the process has from here,
/// libtorch included, and torch's allocator of tensors in host memory.
class FailingAllocation {
 public:
  /// Lets the allocation fail that comes after `before` others.
  explicit FailingAllocation(std::int64_t before);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  /// Whether there were so many allocations.
  static bool happened();
};

}  // namespace fastamp::test
