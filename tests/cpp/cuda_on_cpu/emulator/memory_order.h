// SPDX-License-Identifier: Apache-2.0
#pragma once

// What orders memory, said to ThreadSanitizer; nothing without it.
//
// Each CUDA thread and each stream has a timeline, ThreadSanitizer's notion of a thread. Going from
// one to another orders nothing by itself, so accesses are ordered only by what is said here:
// - a barrier: all that the block did before it comes before all that it does after it;
// - __syncwarp: the same for the lanes; shuffles and votes order nothing;
// - relaxed atomics order nothing. A fence followed by an atomic write publishes what the thread
//   knew at the fence; an atomic read followed by a fence learns what was published there;
// - a launch: the host's past comes before the grid, and the grid before what follows on its
//   stream. Blocks are not ordered with each other.

#include <vector>

namespace emulator {

/// Whether ThreadSanitizer is linked.
bool sees_races();

/// A new timeline, which begins with all that the current one knows. Null without the sanitizer.
/// One must live until its grid has ended: ThreadSanitizer takes a new timeline for the
/// continuation of an ended one whose number it gets, and would overlook races between the two.
void* make_timeline();
void destroy_timeline(void* timeline);
/// That of the caller, to ThreadSanitizer; null without it.
void* current_timeline();
/// Goes over to a timeline and orders nothing; returns the one before.
void* switch_timeline(void* timeline);

/// All that is known here is known to whoever learns from `address` later.
void publish(const void* address);
void learn(const void* address);

/// Whoever owns one of the timelines knows all that they did before, and nothing that they do next.
/// So it has to be said when all of them have come to the barrier and before one goes on: if each
/// published and learned on its own, those that go on late would learn what others did meanwhile.
void meet(const std::vector<void*>& timelines, const void* token);

/// What a CUDA thread keeps for its fences.
struct FenceState {
  static constexpr unsigned kMostReads = 16;
  bool fenced = false;
  char token = 0;
  const void* reads[kMostReads] = {};  ///< Atomically read since the last fence.
  unsigned read_count = 0;
};

/// Calls of the thread at hand, around its relaxed atomic accesses.
void fence();
void before_atomic_write(const void* address);
void after_atomic_read(const void* address);

}  // namespace emulator
