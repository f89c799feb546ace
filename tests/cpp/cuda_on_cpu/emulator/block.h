// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of a block at work, for the emulator's own sources.

#include "cuda_on_cpu/emulator/collectives.h"
#include "cuda_on_cpu/emulator/fibers.h"
#include "cuda_on_cpu/emulator/grid.h"
#include "cuda_on_cpu/emulator/memory_order.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

inline constexpr unsigned kWarp = 32;

/// A CUDA thread.
struct Thread {
  enum class State : std::uint8_t { kReady, kAtBarrier, kAtWarp, kDone };

  Thread(char* stack, void (*entry)(), const Indices& place)
      : fiber(stack, entry), indices(place) {}

  Fiber fiber;
  Indices indices;
  State state = State::kReady;
  FenceState fences;
  // What it waits for, and with what.
  Where where;
  Exchange exchange;
  std::uint64_t received = 0;
};

/// A grid at work. On the heap, as blocks are: when it is freed ThreadSanitizer forgets what its
/// token has ordered.
struct Grid {
  Dim shape;
  Dim block_shape;
  const std::function<void()>& body;
  char end_token = 0;
};

struct Block {
  Grid* grid = nullptr;
  std::unique_ptr<Stacks> stacks;
  std::vector<std::unique_ptr<Thread>> threads;
  Thread* current = nullptr;
  void* timeline = nullptr;  ///< Of the OS thread, which knows what the host knew at the launch.
  char barrier_token = 0;
  std::vector<char> warp_tokens;
};

/// Of the calling OS thread.
Block& current_block();
Thread& current_thread();

/// Ends the program; says where the block's threads are.
[[noreturn]] void fail_block(const Block& block, const char* what);

/// Let threads go on whose barrier or collective is complete; false: none could.
bool open_barrier(Block& block);
bool open_warps(Block& block);

}  // namespace emulator
