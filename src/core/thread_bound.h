// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

// Shared by objects that change the state of one thread: each finds its own entry by a number, and
// on another thread finds none.
namespace fastamp {

/// Gives out numbers that no other object of this class in the process gives out; never 0. Not
/// thread-safe: one per thread.
class SerialNumbers {
 public:
  SerialNumbers() noexcept;
  std::uint64_t next() noexcept { return ++last_; }

 private:
  std::uint64_t last_;
};

/// The object of type T that each thread has, made at its first use and destroyed when the thread
/// ends.
///
/// Reached through a plain pointer: code that runs later, in the destructors of other thread-local
/// and static objects, finds no object instead of a freed one, or makes a new one, which is leaked.
template <class T>
class PerThread {
 public:
  /// Null before make() and after the end of the thread.
  static T* get() noexcept { return t_object; }

  static T& make() {
    T* object = t_object;
    if (object == nullptr) [[unlikely]] {
      thread_local const EndOfThread end;
      object = t_object = new T;  // NOLINT(cppcoreguidelines-owning-memory)
    }
    return *object;
  }

 private:
  struct EndOfThread {
    EndOfThread() = default;
    EndOfThread(const EndOfThread&) = delete;
    EndOfThread(EndOfThread&&) = delete;
    EndOfThread& operator=(const EndOfThread&) = delete;
    EndOfThread& operator=(EndOfThread&&) = delete;
    ~EndOfThread() {
      delete std::exchange(t_object, nullptr);  // NOLINT(cppcoreguidelines-owning-memory)
    }
  };

  inline static constinit thread_local T* t_object = nullptr;
};

/// Warns, once in a process, that an object of this class was destroyed where its entry is not
/// known: on another thread, or after the end of its own. For destructors, which cannot throw.
void warn_of_other_thread(const char* class_name) noexcept;

}  // namespace fastamp
