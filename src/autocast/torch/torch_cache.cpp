// SPDX-License-Identifier: Apache-2.0
#include "autocast/torch/torch_cache.h"

#include "autocast/torch/torch_state.h"

#include <ATen/autocast_mode.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#ifdef __linux__
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastamp::autocast {
namespace {

/// Whether its thread is in torch's cache now. Never freed, so that the exit handler can look at
/// all of them; a new thread reuses that of a thread that has ended.
struct Presence {
  std::atomic<bool> inside{false};
  std::atomic<bool> owned{true};
  Presence* next = nullptr;
};

std::atomic<Presence*> g_presences{nullptr};
std::atomic<bool> g_process_exits{false};

/// Makes visible here what other threads stored before they loaded g_process_exits. They use no
/// fence, which would cost something in every region; this one costs some milliseconds, once.
void fence_all_threads() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__linux__) && defined(SYS_membarrier)
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0) {
    return;
  }
#endif
  std::this_thread::sleep_for(std::chrono::milliseconds(10));  // No store takes that long.
}

/// Runs before the destructor of torch's cache. A thread that does not leave within a second waits
/// for something that it can no longer get, such as Python's lock.
void wait_for_threads_to_leave() {
  g_process_exits.store(true);
  // A thread that is not seen below takes a presence later, and then sees the flag.
  bool others = false;
  for (const Presence* p = g_presences.load(); p != nullptr; p = p->next) {
    others = others || p->owned.load();
  }
  if (!others) {
    return;
  }
  fence_all_threads();
  int milliseconds = 1000;
  for (const Presence* p = g_presences.load(); p != nullptr; p = p->next) {
    while (p->inside.load(std::memory_order_acquire) && milliseconds-- > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

/// Handlers run in the reverse order of their registration: torch's cache has to exist first.
void watch_exit() {
  static std::atomic<bool> watches{false};
  if (!watches.load(std::memory_order_relaxed) && !watches.exchange(true)) [[unlikely]] {
    static_cast<void>(std::atexit(wait_for_threads_to_leave));
  }
}

Presence* find_presence() {
  for (Presence* p = g_presences.load(); p != nullptr; p = p->next) {
    if (!p->owned.load(std::memory_order_relaxed) && !p->owned.exchange(true)) {
      return p;
    }
  }
  auto* made = new Presence;  // NOLINT(cppcoreguidelines-owning-memory): never freed
  made->next = g_presences.load();
  while (!g_presences.compare_exchange_weak(made->next, made)) {
  }
  return made;
}

constinit thread_local Presence* t_presence = nullptr;

struct EndOfThread {
  EndOfThread() = default;
  EndOfThread(const EndOfThread&) = delete;
  EndOfThread& operator=(const EndOfThread&) = delete;
  EndOfThread(EndOfThread&&) = delete;
  EndOfThread& operator=(EndOfThread&&) = delete;
  /// Code that runs on the thread after this takes another one, and keeps it.
  ~EndOfThread() {
    if (t_presence != nullptr) {
      std::exchange(t_presence, nullptr)->owned.store(false, std::memory_order_release);
    }
  }
};

Presence& presence() {
  if (t_presence == nullptr) [[unlikely]] {
    thread_local const EndOfThread end;
    t_presence = find_presence();
  }
  return *t_presence;
}

/// Runs `function` unless this thread is in the cache already, or the process exits.
template <class Function>
void in_torch_cache(const Function& function) {
  Presence& mine = presence();
  if (mine.inside.load(std::memory_order_relaxed)) {
    return;
  }
  mine.inside.store(true, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // See fence_all_threads().
  if (!g_process_exits.load()) {
    try {
      function();
    } catch (...) {
      mine.inside.store(false, std::memory_order_release);
      throw;
    }
  }
  mine.inside.store(false, std::memory_order_release);
}

}  // namespace

void clear_torch_cache() noexcept {
  in_torch_cache([] {
    at::autocast::clear_cache();
    watch_exit();
  });
}

at::Tensor leave_in_torch_cache(const at::Tensor& leaf) {
  at::Tensor kept;
  in_torch_cache([&] {
    const auto cast = at::autocast::cached_cast(region_dtype(c10::kCPU), leaf, c10::kCPU);
    kept = cast.is_same(leaf) ? at::Tensor() : cast;
  });
  return kept;
}

}  // namespace fastamp::autocast
