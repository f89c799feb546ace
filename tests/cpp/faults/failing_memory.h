// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace fastamp::test {

/// Which allocations fail: operator new, which all of the process has from here, libtorch included,
/// and torch's allocator of tensors in host memory.
enum class Fails : std::uint8_t {
  kOne,      ///< One: what is done about the error has memory again.
  kAllFrom,  ///< One and all after it, so that what ends with the error has none either.
};

/// Lets allocations of this thread fail as long as it lives.
class FailingMemory {
 public:
  /// Lets that allocation fail that comes after `before` others.
  FailingMemory(std::int64_t before, Fails fails);
  ~FailingMemory();
  FailingMemory(const FailingMemory&) = delete;
  FailingMemory& operator=(const FailingMemory&) = delete;

  /// Whether there were so many allocations.
  static bool happened();
};

}  // namespace fastamp::test
