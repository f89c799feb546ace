// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

// Catch2's assertions are not thread-safe: threads count what goes wrong, the test checks the
// count.
namespace fastamp::test {

/// Lets a fixed number of threads go on only when all have arrived; may be passed many times.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}

  void wait() {
    const int round = round_.load();
    if (arrived_.fetch_add(1) + 1 == threads_) {
      arrived_.store(0);
      round_.store(round + 1);
      return;
    }
    while (round_.load() == round) {
      std::this_thread::yield();
    }
  }

 private:
  int threads_;
  std::atomic<int> arrived_ = 0;
  std::atomic<int> round_ = 0;
};

/// Runs `function(i)` in `count` threads and rethrows the first exception after all have ended.
inline void run_threads(int count, const std::function<void(int)>& function) {
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        function(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        first = first ? first : std::current_exception();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace fastamp::test
