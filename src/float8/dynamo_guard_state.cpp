// SPDX-License-Identifier: Apache-2.0
#include "float8/dynamo_guard_state.h"

#include <ATen/autocast_mode.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <mutex>

namespace fastamp::autocast {
namespace {

struct NumberPair {
  std::uint32_t cpu;
  std::uint32_t cuda;

  bool operator==(const NumberPair&) const = default;
};

/// A digit is a dtype.
constexpr std::size_t kBase = static_cast<std::size_t>(c10::ScalarType::Undefined);
constexpr std::size_t kCapacity = kBase * kBase;
/// Threads that enter regions at the same time take codes after can_mirror_float8() has counted.
constexpr std::size_t kReserve = 64;

/// Pairs in the order of their first use: the index is the code. Of fixed size, so that setting a
/// recipe never allocates.
struct Codes {
  std::mutex mutex;
  std::array<NumberPair, kCapacity> pairs{};
  std::size_t count = 0;
};

/// Never destroyed: other threads may leave regions while the process exits.
Codes& codes() {
  static auto* known = new Codes;
  return *known;
}

/// kCapacity if there is none left.
std::size_t code_of(NumberPair pair) noexcept {
  auto& known = codes();
  const std::scoped_lock lock(known.mutex);
  std::size_t code = 0;
  while (code < known.count && known.pairs[code] != pair) {
    ++code;
  }
  if (code == known.count && code < kCapacity) {
    known.pairs[code] = pair;
    ++known.count;
  }
  return code;
}

void set_digit(c10::DeviceType device, std::size_t digit) {
  at::autocast::set_autocast_dtype(device, static_cast<c10::ScalarType>(digit));
  at::autocast::set_autocast_enabled(device, true);
}

}  // namespace

void mirror_float8(std::uint32_t cpu, std::uint32_t cuda) noexcept {
  const bool is_set = cpu != 0 || cuda != 0;
  const auto code = is_set ? code_of({cpu, cuda}) : kCapacity;
  if (code < kCapacity) {
    set_digit(c10::kMAIA, code % kBase);
    set_digit(c10::kIPU, code / kBase);
    return;
  }
  at::autocast::set_autocast_enabled(c10::kMAIA, false);
  at::autocast::set_autocast_enabled(c10::kIPU, false);
}

bool can_mirror_float8() noexcept {
  auto& known = codes();
  const std::scoped_lock lock(known.mutex);
  return known.count + kReserve <= kCapacity;
}

}  // namespace fastamp::autocast
