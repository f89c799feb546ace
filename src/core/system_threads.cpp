// SPDX-License-Identifier: Apache-2.0
#include "core/system_threads.h"

#include <thread>

#ifdef __linux__
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastamp {

void SystemThreads::fence_all_threads() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__linux__) && defined(SYS_membarrier)
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0) {
    return;
  }
#endif
  std::this_thread::sleep_for(std::chrono::milliseconds(10));  // No store takes that long.
}

void SystemThreads::wait_while(const Atomic<bool>& flag, std::chrono::milliseconds& patience) {
  constexpr std::chrono::milliseconds kStep(1);
  while (flag.load(std::memory_order_acquire) && patience.count() > 0) {
    patience -= kStep;
    std::this_thread::sleep_for(kStep);
  }
}

}  // namespace fastamp
