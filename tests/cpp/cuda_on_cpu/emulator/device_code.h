// SPDX-License-Identifier: Apache-2.0
#pragma once

// What kernels may write in CUDA's language, as C++. Only what fastamp's use, and its neighbours.

#include "cuda_on_cpu/emulator/collectives.h"
#include "cuda_on_cpu/emulator/grid.h"
#include "cuda_on_cpu/emulator/memory_order.h"

#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// Each block has an OS thread.
#define __shared__ static thread_local
#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_shape())
#define gridDim (::emulator::grid_shape())
// What nvcc may rely on is checked here.
#define __builtin_assume(condition) ::emulator::check(static_cast<bool>(condition), #condition)

inline bool __isGlobal(const void* p) { return emulator::is_global(p); }

inline void __syncthreads(emulator::Where where = emulator::Where::current()) {
  emulator::block_barrier(false, where);
}
inline int __syncthreads_or(int value, emulator::Where where = emulator::Where::current()) {
  return emulator::block_barrier(value != 0, where) ? 1 : 0;
}
inline void __threadfence() { emulator::fence(); }
inline void __syncwarp(unsigned mask = 0xffffffffU,
                       emulator::Where where = emulator::Where::current()) {
  emulator::exchange({emulator::Collective::kSync, mask, 0, 0}, where);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emulator::Where where = emulator::Where::current()) {
  const int own = emulator::lane();
  const int from = own + static_cast<int>(delta);
  return emulator::shuffle(mask, value, from / width == own / width ? from : own, where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  emulator::Where where = emulator::Where::current()) {
  const int own = emulator::lane();
  const int from = own ^ bits;
  return emulator::shuffle(mask, value, from / width == own / width ? from : own, where);
}

inline int __any_sync(unsigned mask, int value,
                      emulator::Where where = emulator::Where::current()) {
  const std::uint64_t vote = value != 0 ? 1 : 0;
  return static_cast<int>(emulator::exchange({emulator::Collective::kAny, mask, vote, 0}, where));
}
inline int __all_sync(unsigned mask, int value,
                      emulator::Where where = emulator::Where::current()) {
  const std::uint64_t vote = value != 0 ? 1 : 0;
  return static_cast<int>(emulator::exchange({emulator::Collective::kAll, mask, vote, 0}, where));
}
inline unsigned __ballot_sync(unsigned mask, int value,
                              emulator::Where where = emulator::Where::current()) {
  const std::uint64_t vote = value != 0 ? 1 : 0;
  return static_cast<unsigned>(
      emulator::exchange({emulator::Collective::kBallot, mask, vote, 0}, where));
}

namespace emulator {

/// A relaxed atomic update; returns the value before it.
template <typename T, typename Update>
T read_modify_write(T* at, Update update) {
  before_atomic_write(at);
  T old;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  T next = update(old);
  while (!__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    next = update(old);
  }
  after_atomic_read(at);
  return old;
}

}  // namespace emulator

template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return emulator::read_modify_write(at, [=](T old) { return old + value; });
}
template <typename T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  return emulator::read_modify_write(at, [=](T) { return value; });
}
template <typename T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  return emulator::read_modify_write(at, [=](T old) { return old < value ? value : old; });
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
  return emulator::read_modify_write(at,
                                     [=](unsigned old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* at, unsigned bound) {
  return emulator::read_modify_write(at, [=](unsigned old) { return old >= bound ? 0U : old + 1; });
}

template <typename T>
T __ldcg(const T* at) {
  return *at;
}
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
/// Each digit of `selector`, the lowest first, picks a byte: 0 to 3 of `low`, 4 to 7 of `high`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{high} << 32U | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned digit = selector >> (4 * i) & 7U;
    result |= static_cast<unsigned>(bytes >> (8 * digit) & 0xffU) << (8 * i);
  }
  return result;
}
inline int min(int a, int b) { return b < a ? b : a; }
inline long min(long a, long b) { return b < a ? b : a; }

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
