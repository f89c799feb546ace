// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>

namespace fastamp {

/// Lets threads use an object that dies with the process, and keeps them out from the moment on at
/// which close() returns.
///
/// Threads pay no fence: close() puts one into all of them. Never destroyed, and neither are its
/// presences; threads may pass it while the process exits.
/// @tparam Threads  SystemThreads, or a model of it.
template <class Threads>
class ExitGate {
 public:
  /// Whether one thread is inside now. A new thread reuses that of a thread that has ended.
  struct Presence {
    Threads::template Atomic<bool> inside{false};
    Threads::template Atomic<bool> owned{true};
    Presence* next = nullptr;
  };

  /// A presence that is the caller's until give_back(). Thread-safe.
  Presence& take_presence() {
    for (Presence* p = presences_.load(); p != nullptr; p = p->next) {
      if (!p->owned.load(std::memory_order_relaxed) && !p->owned.exchange(true)) {
        return *p;
      }
    }
    auto* made = new Presence;  // NOLINT(cppcoreguidelines-owning-memory): never freed
    made->next = presences_.load();
    while (!presences_.compare_exchange_weak(made->next, made)) {
    }
    return *made;
  }

  static void give_back(Presence& mine) { mine.owned.store(false, std::memory_order_release); }

  /// Runs `function` unless the caller is inside already or the gate is closed.
  /// @param mine  The calling thread's presence.
  template <class Function>
  void pass(Presence& mine, const Function& function) {
    if (mine.inside.load(std::memory_order_relaxed)) {
      return;
    }
    mine.inside.store(true, std::memory_order_relaxed);
    Threads::compiler_fence();  // The processor's own is close()'s.
    if (!is_closed_.load()) {
      try {
        function();
      } catch (...) {
        mine.inside.store(false, std::memory_order_release);
        throw;
      }
    }
    mine.inside.store(false, std::memory_order_release);
  }

  /// Keeps threads out from now on, and waits for those inside: a second at most for all of them,
  /// since one that does not leave by then waits for something that it can no longer get, such as
  /// Python's lock.
  void close() {
    is_closed_.store(true);
    // A thread that is not seen below takes a presence later, and then sees that this is closed.
    bool others = false;
    for (const Presence* p = presences_.load(); p != nullptr; p = p->next) {
      others = others || p->owned.load();
    }
    if (!others) {
      return;
    }
    Threads::fence_all_threads();
    std::chrono::milliseconds patience(1000);
    for (const Presence* p = presences_.load(); p != nullptr; p = p->next) {
      Threads::wait_while(p->inside, patience);
    }
  }

 private:
  Threads::template Atomic<Presence*> presences_{nullptr};
  Threads::template Atomic<bool> is_closed_{false};
};

}  // namespace fastamp
