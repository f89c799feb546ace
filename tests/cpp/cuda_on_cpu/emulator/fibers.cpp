// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/emulator/fibers.h"

#include "cuda_on_cpu/emulator/memory_order.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

extern "C" {
// Of AddressSanitizer's runtime, if it is linked.
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* bottom,
                                                  std::size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* save, const void** bottom,
                                                   std::size_t* size);
}

namespace emulator {
namespace {

constexpr std::size_t kGuardBytes = 4096;

/// Stacks that are not in use: touching new pages costs more than all the rest.
struct Pool {
  std::mutex mutex;
  std::map<std::size_t, std::vector<char*>> free;
};

Pool& pool() {
  static auto* const instance = new Pool();
  return *instance;
}

char* map_stacks(std::size_t bytes, std::size_t count) {
  void* const fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (fresh == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  auto* const memory = static_cast<char*>(fresh);
  for (std::size_t i = 0; i < count; ++i) {
    mprotect(memory + i * Stacks::kBytes, kGuardBytes, PROT_NONE);
  }
  return memory;
}

}  // namespace

Stacks::Stacks(unsigned count) : bytes_(count * kBytes) {
  {
    const std::scoped_lock lock(pool().mutex);
    auto& free = pool().free[bytes_];
    if (!free.empty()) {
      memory_ = free.back();
      free.pop_back();
      return;
    }
  }
  memory_ = map_stacks(bytes_, count);
}

Stacks::~Stacks() {
  if (sees_races()) {  // one thread's accesses would race with those of the next on its stack
    munmap(memory_, bytes_);
    return;
  }
  const std::scoped_lock lock(pool().mutex);
  pool().free[bytes_].push_back(memory_);
}

Fiber::Fiber(char* stack, void (*entry)()) : stack_(stack), timeline_(make_timeline()) {
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack;
  own_.uc_stack.ss_size = Stacks::kBytes;
  own_.uc_link = nullptr;
  makecontext(&own_, entry, 0);
}

Fiber::~Fiber() { destroy_timeline(timeline_); }

void Fiber::resume() {
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&caller_fake_stack_, stack_, Stacks::kBytes);
  }
  caller_timeline_ = switch_timeline(timeline_);
  swapcontext(&caller_, &own_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(caller_fake_stack_, nullptr, nullptr);
  }
}

void Fiber::started() {
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &caller_bottom_, &caller_size_);
  }
}

void Fiber::suspend() {
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&fake_stack_, caller_bottom_, caller_size_);
  }
  switch_timeline(caller_timeline_);
  swapcontext(&own_, &caller_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(fake_stack_, &caller_bottom_, &caller_size_);
  }
}

void Fiber::finish() {
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(nullptr, caller_bottom_, caller_size_);
  }
  switch_timeline(caller_timeline_);
  setcontext(&caller_);
  std::abort();
}

bool Fiber::has_on_stack(const void* address) const {
  const auto* const at = static_cast<const char*>(address);
  return at >= stack_ && at < stack_ + Stacks::kBytes;
}

}  // namespace emulator
