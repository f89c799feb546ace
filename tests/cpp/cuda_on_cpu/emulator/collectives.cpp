// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/emulator/collectives.h"

#include "cuda_on_cpu/emulator/block.h"

#include <algorithm>

namespace emulator {
namespace {

bool has_lane(unsigned mask, unsigned lane) { return (mask >> lane & 1U) != 0; }

/// Lanes are [begin, end) of the block's threads.
struct Warp {
  Block& block;
  std::size_t begin;
  std::size_t end;

  Thread& lane(unsigned i) const { return *block.threads[begin + i]; }
  bool exists(unsigned i) const { return begin + i < end; }
};

/// Whether all lanes of the mask of `one` wait for the same collective.
bool complete(const Warp& warp, const Thread& one) {
  const unsigned mask = one.exchange.mask;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (!has_lane(mask, i)) {
      continue;
    }
    if (!warp.exists(i) || warp.lane(i).state == Thread::State::kDone) {
      fail_block(warp.block, "a lane of the mask has ended or does not exist");
    }
    const Thread& other = warp.lane(i);
    if (other.state != Thread::State::kAtWarp) {
      return false;
    }
    if (other.exchange.mask != mask || other.exchange.kind != one.exchange.kind ||
        other.where.line() != one.where.line()) {
      fail_block(warp.block, "lanes of one mask are at different collectives");
    }
  }
  return true;
}

std::uint64_t result_for(const Warp& warp, const Thread& thread, std::uint64_t ballot) {
  const Exchange& own = thread.exchange;
  switch (own.kind) {
    case Collective::kShuffle:
      if (!has_lane(own.mask, static_cast<unsigned>(own.source))) {
        fail_block(warp.block, "a shuffle reads a lane outside its mask");
      }
      return warp.lane(static_cast<unsigned>(own.source)).exchange.value;
    case Collective::kAny:
      return ballot != 0 ? 1 : 0;
    case Collective::kAll:
      return ballot == own.mask ? 1 : 0;
    default:
      return ballot;
  }
}

/// Gives the lanes of a complete collective their results.
void finish(const Warp& warp, unsigned mask) {
  std::uint64_t ballot = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (has_lane(mask, i)) {
      ballot |= (warp.lane(i).exchange.value & 1U) << i;
    }
  }
  std::vector<void*> timelines;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (has_lane(mask, i)) {
      warp.lane(i).received = result_for(warp, warp.lane(i), ballot);
      warp.lane(i).state = Thread::State::kReady;
      if (warp.lane(i).exchange.kind == Collective::kSync) {  // the others order no memory
        timelines.push_back(warp.lane(i).fiber.timeline());
      }
    }
  }
  meet(timelines, &warp.block.warp_tokens[warp.begin / kWarp]);
}

}  // namespace

bool open_barrier(Block& block) {
  const Thread& first = *block.threads.front();
  const auto waits = [](const auto& thread) { return thread->state == Thread::State::kAtBarrier; };
  if (!std::ranges::all_of(block.threads, waits)) {
    return false;
  }
  std::uint64_t any = 0;
  for (const auto& thread : block.threads) {
    if (thread->where.line() != first.where.line()) {
      fail_block(block, "threads of the block wait at different barriers");
    }
    any |= thread->exchange.value;
  }
  std::vector<void*> timelines;
  for (const auto& thread : block.threads) {
    thread->state = Thread::State::kReady;
    thread->received = any;
    timelines.push_back(thread->fiber.timeline());
  }
  meet(timelines, &block.barrier_token);
  return true;
}

bool open_warps(Block& block) {
  bool opened = false;
  for (std::size_t begin = 0; begin < block.threads.size(); begin += kWarp) {
    const Warp warp{block, begin, std::min(begin + kWarp, block.threads.size())};
    for (std::size_t i = warp.begin; i < warp.end; ++i) {
      const Thread& thread = *block.threads[i];
      if (thread.state == Thread::State::kAtWarp && complete(warp, thread)) {
        finish(warp, thread.exchange.mask);
        opened = true;
      }
    }
  }
  return opened;
}

bool block_barrier(bool value, Where where) {
  Thread& thread = current_thread();
  thread.state = Thread::State::kAtBarrier;
  thread.where = where;
  thread.exchange.value = value ? 1 : 0;
  thread.fiber.suspend();
  return thread.received != 0;
}

std::uint64_t exchange(const Exchange& own, Where where) {
  Thread& thread = current_thread();
  if (!has_lane(own.mask, static_cast<unsigned>(lane()))) {
    fail("a lane calls a collective whose mask is without it", where);
  }
  thread.exchange = own;
  thread.where = where;
  thread.state = Thread::State::kAtWarp;
  thread.fiber.suspend();
  return thread.received;
}

}  // namespace emulator
