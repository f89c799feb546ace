// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <atomic>
#include <chrono>
#include <mutex>

namespace fastamp {

/// The primitives that lock-free code of fastamp uses, as a template argument: tests put a model in
/// its place that tries every interleaving (tests/cpp/interleavings).
struct SystemThreads {
  template <class T>
  using Atomic = std::atomic<T>;
  using Mutex = std::mutex;

  /// Keeps the compiler from moving accesses of this thread across it; costs nothing at run time.
  static void compiler_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

  /// Puts a full fence into every thread of the process, between any two of its instructions.
  /// Takes some milliseconds.
  static FASTAMP_API void fence_all_threads();

  /// Waits until `flag` is false, at most as long as `patience` says, and takes that off it.
  static FASTAMP_API void wait_while(const Atomic<bool>& flag, std::chrono::milliseconds& patience);
};

}  // namespace fastamp
