// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

// Runs a few threads in every order that C++'s memory model allows, and stops at the first that
// breaks a rule. For lock-free code that takes its primitives as a template argument: ModelThreads
// stands for fastamp::SystemThreads.
//
// What is explored: at each operation on an Atomic, a Mutex or a fence, which thread goes next; at
// each load, which of the stores that it may see it sees (a thread may read old values for as long
// as nothing that happens before the load says otherwise). Orders that differ only in how
// operations that do not touch each other follow one another are run once (sleep sets).
// What is checked: requirements of the program, accesses of Plain values that no order of
// happens-before separates (data races), and threads that wait for ever.
// What is left out: stores to one location take effect in the order in which they are run, a weak
// compare-exchange never fails without a reason, and a relaxed load never returns a value that is
// stored later.
namespace fastamp::interleavings {

class Program {
 public:
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  Program(Program&&) = delete;
  Program& operator=(Program&&) = delete;
  virtual ~Program() = default;

  /// Adds a thread; called by the function that explore() is given.
  virtual void thread(std::function<void()> body) = 0;
  /// Sets what runs after all threads have ended.
  virtual void afterwards(std::function<void()> body) = 0;
};

struct Exploration {
  std::uint64_t runs = 0;   ///< Complete ones.
  bool is_complete = true;  ///< There is no order left that was not run.
  std::string failure;      ///< What the first bad run did, step by step; empty without one.
};

/// Runs every order of a program of at most 4 threads. `make` is called before each run, and makes
/// the objects that its threads share.
Exploration explore(const std::function<void(Program&)>& make, std::uint64_t max_runs = 3'000'000);

/// Ends the exploration with a failure unless `condition` holds. For threads of a program.
void require(bool condition, const char* what);

namespace detail {

enum class Kind : std::uint8_t { load, store, exchange, compare_exchange, lock, unlock, fence };

/// What one location of the model can do, on 64 bits.
class Location {
 public:
  explicit Location(std::uint64_t value);
  std::uint64_t load(std::memory_order order) const;
  void store(std::uint64_t value, std::memory_order order);
  std::uint64_t exchange(std::uint64_t value, std::memory_order order);
  std::uint64_t fetch_add(std::uint64_t value, std::memory_order order);
  bool compare_exchange(std::uint64_t& expected, std::uint64_t desired, std::memory_order order);
  /// Waits until it may see `value`, and acquires it.
  void await(std::uint64_t value) const;
  /// Waits until the newest value is 0, and makes it 1 in the same step.
  void lock();
  void unlock();

 private:
  std::size_t id_;
};

void fence_all_threads();
std::size_t make_plain();
void read_plain(std::size_t id);
void write_plain(std::size_t id);

}  // namespace detail

/// A value that is not atomic: accesses of two threads of which one writes have to be ordered.
template <class T>
class Plain {
 public:
  explicit Plain(T value = {}) : value_(value) {}
  T get() const {
    detail::read_plain(id_);
    return value_;
  }
  void set(T value) {
    detail::write_plain(id_);
    value_ = value;
  }

 private:
  std::size_t id_ = detail::make_plain();
  T value_;
};

struct ModelThreads {
  template <class T>
  class Atomic {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));

   public:
    explicit Atomic(T value) : location_(to_bits(value)) {}
    T load(std::memory_order order = std::memory_order_seq_cst) const {
      return from_bits(location_.load(order));
    }
    void store(T value, std::memory_order order = std::memory_order_seq_cst) {
      location_.store(to_bits(value), order);
    }
    T exchange(T value, std::memory_order order = std::memory_order_seq_cst) {
      return from_bits(location_.exchange(to_bits(value), order));
    }
    T fetch_add(T value, std::memory_order order = std::memory_order_seq_cst) {
      return from_bits(location_.fetch_add(to_bits(value), order));
    }
    bool compare_exchange_weak(T& expected, T desired,
                               std::memory_order order = std::memory_order_seq_cst) {
      auto bits = to_bits(expected);
      const bool exchanged = location_.compare_exchange(bits, to_bits(desired), order);
      expected = from_bits(bits);
      return exchanged;
    }
    void await(T value) const { location_.await(to_bits(value)); }

   private:
    static std::uint64_t to_bits(T value) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, &value, sizeof(T));
      return bits;
    }
    static T from_bits(std::uint64_t bits) {
      T value;
      std::memcpy(&value, &bits, sizeof(T));
      return value;
    }
    detail::Location location_;
  };

  class Mutex {
   public:
    void lock() { is_locked_.lock(); }
    void unlock() { is_locked_.unlock(); }

   private:
    detail::Location is_locked_{0};
  };

  static void compiler_fence() {}
  static void fence_all_threads() { detail::fence_all_threads(); }
  /// Waits without a limit: a thread that never leaves is a failure of the program.
  static void wait_while(const Atomic<bool>& flag, std::chrono::milliseconds& /*patience*/) {
    flag.await(false);
  }
};

}  // namespace fastamp::interleavings
