// SPDX-License-Identifier: Apache-2.0
#pragma once

// Grids: blocks one after the other, each on an OS thread of its own, the threads of a block as
// fibers of it.

#include <cstdint>
#include <functional>
#include <source_location>

namespace emulator {

struct Dim {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

/// What threadIdx and its like are for a thread.
struct Indices {
  Dim thread;
  Dim block;
  Dim block_shape;
  Dim grid_shape;
};
Dim thread_index();
Dim block_index();
Dim block_shape();
Dim grid_shape();
/// Its number within the warp.
int lane();

/// The order in which blocks, and threads between two barriers, are run: results must not depend on
/// it. A random one changes at each barrier.
enum class Order : std::uint8_t { kForward, kReverse, kRandom };
void set_order(Order order);

/// Runs body() for every thread of every block.
void run_grid(Dim shape, Dim block_shape, const std::function<void()>& body);

using Where = std::source_location;

[[noreturn]] void fail(const char* what, Where where);
void check(bool holds, const char* text, Where where = Where::current());

/// Not on the stack of the thread at hand; null may be anywhere.
bool is_global(const void* address);

}  // namespace emulator
