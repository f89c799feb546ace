// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/emulator/memory_order.h"

#include "cuda_on_cpu/emulator/block.h"

#include <algorithm>
#include <span>

extern "C" {
// Of ThreadSanitizer's runtime, if it is linked.
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}

namespace emulator {
namespace {

/// Only what was known when `from` was published reaches `to`, and not what the thread has learnt
/// since: through a timeline that knows nothing else.
void hand_over(const void* from, const void* to) {
  void* const own = switch_timeline(current_block().timeline);
  void* const courier = make_timeline();
  switch_timeline(courier);
  learn(from);
  publish(to);
  switch_timeline(own);
  destroy_timeline(courier);
}

}  // namespace

bool sees_races() { return __tsan_create_fiber != nullptr; }

void* make_timeline() { return sees_races() ? __tsan_create_fiber(0) : nullptr; }

void destroy_timeline(void* timeline) {
  if (timeline != nullptr) {
    __tsan_destroy_fiber(timeline);
  }
}

void* current_timeline() { return sees_races() ? __tsan_get_current_fiber() : nullptr; }

void* switch_timeline(void* timeline) {
  constexpr unsigned kOrdersNothing = 1;
  if (timeline == nullptr) {
    return nullptr;
  }
  void* const before = current_timeline();
  __tsan_switch_to_fiber(timeline, kOrdersNothing);
  return before;
}

void publish(const void* address) {
  if (sees_races()) {
    __tsan_release(const_cast<void*>(address));
  }
}

void learn(const void* address) {
  if (sees_races()) {
    __tsan_acquire(const_cast<void*>(address));
  }
}

void meet(const std::vector<void*>& timelines, const void* token) {
  if (!sees_races()) {
    return;
  }
  void* const own = current_timeline();
  for (void* const timeline : timelines) {
    switch_timeline(timeline);
    publish(token);
  }
  for (void* const timeline : timelines) {
    switch_timeline(timeline);
    learn(token);
  }
  switch_timeline(own);
}

void fence() {
  FenceState& state = current_thread().fences;
  for (unsigned i = 0; i < state.read_count; ++i) {
    learn(state.reads[i]);
  }
  state.read_count = 0;
  publish(&state.token);
  state.fenced = true;
}

void before_atomic_write(const void* address) {
  if (sees_races() && current_thread().fences.fenced) {
    hand_over(&current_thread().fences.token, address);
  }
}

void after_atomic_read(const void* address) {
  FenceState& state = current_thread().fences;
  const std::span<const void* const> known(state.reads, state.read_count);
  if (sees_races() && std::ranges::find(known, address) == known.end()) {
    state.reads[state.read_count < FenceState::kMostReads ? state.read_count++ : 0] = address;
  }
}

}  // namespace emulator
