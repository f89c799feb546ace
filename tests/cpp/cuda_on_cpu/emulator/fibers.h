// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls that can be left in the middle and resumed later: what a block's threads are made of.

#include <ucontext.h>

#include <cstddef>

namespace emulator {

/// Memory for the stacks of a block, with an inaccessible page below each. A call may have 32 KiB
/// of arguments, of which each thread has its own copy.
class Stacks {
 public:
  static constexpr std::size_t kBytes = std::size_t{192} * 1024;

  explicit Stacks(unsigned count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* at(unsigned i) const { return memory_ + i * kBytes; }

 private:
  std::size_t bytes_;
  char* memory_;
};

/// One such call. It is resumed by the OS thread that runs its block and goes back there.
class Fiber {
 public:
  /// `entry` must end with finish().
  Fiber(char* stack, void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();
  /// From within: goes back to where it was resumed.
  void suspend();
  /// From within, once, before anything else.
  void started();
  [[noreturn]] void finish();

  bool has_on_stack(const void* address) const;
  void* timeline() const { return timeline_; }

 private:
  ucontext_t own_{};
  ucontext_t caller_{};
  char* stack_;
  // What the sanitizers keep for a stack, and know threads by.
  void* fake_stack_ = nullptr;
  void* caller_fake_stack_ = nullptr;
  const void* caller_bottom_ = nullptr;
  std::size_t caller_size_ = 0;
  void* timeline_;
  void* caller_timeline_ = nullptr;
};

}  // namespace emulator
