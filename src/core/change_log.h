// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_set>

namespace fastamp {

/// Numbered announcements of changes, read by threads that each know how many they have seen.
///
/// Trivially destructible, for use while the process exits. Thread-safe.
/// @tparam Threads      SystemThreads, or a model of it.
/// @tparam kRemembered  How far a thread may fall behind; one that is further behind learns that
///                      anything may have changed.
template <class Threads, class Key, std::size_t kRemembered>
class ChangeLog {
 public:
  struct Changes {
    std::uint64_t count = 0;  ///< How many were announced so far.
    bool all = false;         ///< More than are remembered: any key may be among them.
    std::unordered_set<Key> keys;
  };

  /// Number of announcements so far. Says that there is something new, and not what: what was
  /// written before an announcement is visible after since().
  std::uint64_t count() const { return count_.load(std::memory_order_relaxed); }

  /// Announces some changes; each counts as one.
  template <class Keys>
  void add(const Keys& keys) {
    const std::scoped_lock lock(mutex_);
    auto count = count_.load(std::memory_order_relaxed);
    for (const Key& key : keys) {
      ring_[count++ % kRemembered] = key;
    }
    count_.store(count, std::memory_order_relaxed);
  }

  /// The changes announced after the first `seen`.
  Changes since(std::uint64_t seen) {
    Changes changes;
    const std::scoped_lock lock(mutex_);
    changes.count = count_.load(std::memory_order_relaxed);
    changes.all = changes.count - seen > kRemembered;
    for (auto i = changes.all ? changes.count : seen; i < changes.count; ++i) {
      changes.keys.insert(ring_[i % kRemembered]);
    }
    return changes;
  }

 private:
  Threads::Mutex mutex_;
  Threads::template Atomic<std::uint64_t> count_{0};
  std::array<Key, kRemembered> ring_{};  ///< Change number n is at n % kRemembered.
};

}  // namespace fastamp
