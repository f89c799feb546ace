// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the threads of a block or the lanes of a warp do together.

#include "cuda_on_cpu/emulator/grid.h"

#include <cstdint>
#include <type_traits>

namespace emulator {

/// Waits for the whole block. Returns whether some thread gave a value other than 0.
bool block_barrier(bool value, Where where);

enum class Collective : std::uint8_t { kShuffle, kAny, kAll, kBallot, kSync };

/// What a lane brings to a collective of the lanes in `mask`.
struct Exchange {
  Collective kind{};
  unsigned mask = 0;
  std::uint64_t value = 0;
  int source = 0;  ///< The lane whose value a shuffle returns.
};

/// Waits for all lanes of the mask; returns what the collective gives this lane.
std::uint64_t exchange(const Exchange& own, Where where);

template <typename T>
T shuffle(unsigned mask, T value, int source, Where where) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  std::uint64_t word = 0;
  __builtin_memcpy(&word, &value, sizeof(T));
  word = exchange({Collective::kShuffle, mask, word, source}, where);
  __builtin_memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emulator
