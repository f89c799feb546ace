// SPDX-License-Identifier: Apache-2.0
// After close() no thread uses what dies with the process, in any order of what the threads do.
#include "core/exit_gate.h"
#include "interleavings/explorer.h"
#include "support/catch.h"

#include <memory>
#include <mutex>
#include <stdexcept>

namespace {

using namespace fastamp::interleavings;

struct WithoutFence : ModelThreads {
  static void fence_all_threads() {}
};

struct WithoutWait : ModelThreads {
  static void wait_while(const Atomic<bool>& flag, std::chrono::milliseconds& /*patience*/) {
    static_cast<void>(flag.load(std::memory_order_acquire));
  }
};

/// Every operation as weak as C++ has it.
struct Relaxed : ModelThreads {
  template <class T>
  struct Atomic : ModelThreads::Atomic<T> {
    using Base = ModelThreads::Atomic<T>;
    using Base::Base;
    static constexpr auto kWeak = std::memory_order_relaxed;
    T load(std::memory_order /*order*/ = kWeak) const { return Base::load(kWeak); }
    void store(T value, std::memory_order /*order*/ = kWeak) { Base::store(value, kWeak); }
  };
};

template <class Threads>
struct Process {
  fastamp::ExitGate<Threads> gate;
  ModelThreads::Mutex lock;  ///< Of the cache.
  Plain<int> cache;          ///< Dies after close().
};

/// Threads use the cache one after the other, as it has a lock of its own; one ends the process.
template <class Threads>
Exploration explore_exit(int users, bool throws = false) {
  return explore([=](Program& program) {
    auto process = std::make_shared<Process<Threads>>();
    for (int i = 0; i < users; ++i) {
      program.thread([=] {
        auto& mine = process->gate.take_presence();
        try {
          process->gate.pass(mine, [&] {
            const std::scoped_lock guard(process->lock);
            process->cache.set(process->cache.get() + 1);
            process->gate.pass(mine, [] { require(false, "a thread is inside twice"); });
            if (throws) {
              throw std::runtime_error("of the user's code");
            }
          });
        } catch (const std::runtime_error&) {
          require(throws, "an exception that nobody threw");
        }
        process->gate.give_back(mine);
      });
    }
    program.thread([=] {
      process->gate.close();
      process->cache.set(-1);  // Its destructor: a race with any use that is not over.
    });
  });
}

}  // namespace

TEST_CASE("no thread is in the cache when it dies") {
  for (const int users : {1, 2}) {
    const auto result = explore_exit<ModelThreads>(users);
    CAPTURE(users, result.runs);
    CHECK(result.failure == "");
    CHECK(result.is_complete);
    CHECK(result.runs > 20);
  }
}

TEST_CASE("a use that ends with an exception is over, too") {
  const auto result = explore_exit<ModelThreads>(1, /*throws=*/true);
  CHECK(result.failure == "");
  CHECK(result.is_complete);
}

TEST_CASE("the fence in all threads, the wait and each order are needed") {
  CHECK_THAT(explore_exit<WithoutFence>(1).failure, Catch::Contains("data race"));
  CHECK_THAT(explore_exit<WithoutWait>(1).failure, Catch::Contains("data race"));
  CHECK_THAT(explore_exit<Relaxed>(1).failure, Catch::Contains("data race"));
}
