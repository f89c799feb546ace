// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/emulator/grid.h"

#include "cuda_on_cpu/emulator/block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>

namespace emulator {
namespace {

thread_local Block* t_block = nullptr;
Order g_order = Order::kForward;

/// Puts numbers into the order asked for.
void arrange(std::vector<unsigned>& numbers, std::mt19937& random) {
  std::iota(numbers.begin(), numbers.end(), 0U);
  if (g_order == Order::kReverse) {
    std::reverse(numbers.begin(), numbers.end());
  } else if (g_order == Order::kRandom) {
    std::shuffle(numbers.begin(), numbers.end(), random);
  }
}

/// What a thread's fiber runs.
void run_thread() {
  Thread& thread = current_thread();
  thread.fiber.started();
  Grid& grid = *current_block().grid;
  grid.body();
  publish(&grid.end_token);
  thread.state = Thread::State::kDone;
  thread.fiber.finish();
}

/// Runs each thread that is ready until it waits or ends; false: none was.
bool run_ready(Block& block, const std::vector<unsigned>& order) {
  bool moved = false;
  for (const unsigned i : order) {
    Thread& thread = *block.threads[i];
    if (thread.state == Thread::State::kReady) {
      block.current = &thread;
      thread.fiber.resume();
      moved = true;
    }
  }
  return moved;
}

void make_threads(Block& block, unsigned index) {
  const unsigned count = block.grid->block_shape.x;
  block.stacks = std::make_unique<Stacks>(count);
  block.warp_tokens.resize(count / kWarp + 1);
  for (unsigned i = 0; i < count; ++i) {
    const Indices place{{i, 0, 0}, {index, 0, 0}, block.grid->block_shape, block.grid->shape};
    block.threads.push_back(std::make_unique<Thread>(block.stacks->at(i), run_thread, place));
  }
}

void run_block(Block& block, unsigned index) {
  t_block = &block;
  block.timeline = current_timeline();
  make_threads(block, index);
  std::mt19937 random(index);
  std::vector<unsigned> order(block.threads.size());
  const auto done = [](const auto& thread) { return thread->state == Thread::State::kDone; };
  while (!std::ranges::all_of(block.threads, done)) {
    arrange(order, random);
    bool moved = run_ready(block, order);
    moved = open_warps(block) || moved;
    moved = open_barrier(block) || moved;
    if (!moved) {
      fail_block(block, "no thread can go on: not all of them come to a barrier or collective");
    }
  }
  t_block = nullptr;
}

}  // namespace

void set_order(Order order) { g_order = order; }

Block& current_block() { return *t_block; }
Thread& current_thread() { return *t_block->current; }

Dim thread_index() { return current_thread().indices.thread; }
Dim block_index() { return current_thread().indices.block; }
Dim block_shape() { return current_thread().indices.block_shape; }
Dim grid_shape() { return current_thread().indices.grid_shape; }
int lane() { return static_cast<int>(thread_index().x % kWarp); }

void run_grid(Dim shape, Dim block_shape, const std::function<void()>& body) {
  const auto grid = std::make_unique<Grid>(Grid{shape, block_shape, body});
  std::mt19937 random(shape.x);
  std::vector<unsigned> order(shape.x);
  arrange(order, random);
  // Kept until the grid has ended (memory_order.h). An OS thread each: shared memory is
  // thread-local, and what one block leaves behind must not reach the next.
  std::vector<std::unique_ptr<Block>> blocks;
  for (const unsigned index : order) {
    blocks.push_back(std::make_unique<Block>());
    blocks.back()->grid = grid.get();
    std::thread([&] { run_block(*blocks.back(), index); }).join();
    if (!sees_races()) {
      blocks.clear();
    }
  }
  learn(&grid->end_token);
}

void fail(const char* what, Where where) {
  std::fprintf(stderr, "emulator: %s (%s:%u)\n", what, where.file_name(), where.line());
  std::abort();
}

void check(bool holds, const char* text, Where where) {
  if (!holds) {
    fail(text, where);
  }
}

void fail_block(const Block& block, const char* what) {
  std::fprintf(stderr, "emulator: block %u: %s\n", block.threads.front()->indices.block.x, what);
  unsigned shown = 0;
  for (const auto& thread : block.threads) {
    if (thread->state != Thread::State::kDone && shown++ < 4) {
      std::fprintf(stderr, "  thread %u waits at %s:%u\n", thread->indices.thread.x,
                   thread->where.file_name(), thread->where.line());
    }
  }
  std::abort();
}

bool is_global(const void* address) {
  return address == nullptr || t_block == nullptr || !current_thread().fiber.has_on_stack(address);
}

}  // namespace emulator
