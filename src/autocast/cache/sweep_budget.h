// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace fastamp::autocast {

/// Decides when a cache looks through its casts for those of tensors that are gone.
///
/// Nothing tells when a tensor dies. So each new cast pays for a few looks, and a large one, which
/// takes longer to make, for more: looking never costs a noticeable part of casting, and the memory
/// of dead casts stays below some 16 KiB for each cast that the cache holds, plus a few casts.
class SweepBudget {
 public:
  /// Counts a new cast. Returns whether all `entries` are to be looked through now.
  bool pays_for(std::size_t entries, std::size_t cast_bytes) {
    constexpr std::size_t kLooksPerCast = 4;
    constexpr std::size_t kBytesPerLook = 16384;
    looks_ += kLooksPerCast + cast_bytes / kBytesPerLook;
    if (looks_ < entries) {
      return false;
    }
    looks_ = 0;
    return true;
  }

 private:
  std::size_t looks_ = 0;
};

}  // namespace fastamp::autocast
