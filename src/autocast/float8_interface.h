// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

// All that autocast asks of fp8. src/float8, which is built upon autocast, implements it. Partly
// exported for the Python module; not part of the public API.
namespace fastamp::autocast {

// -- Regions. A recipe is state of fastamp's own beside torch's, whose public dtype is the base
// dtype.

/// Whether any thread has ever had a setting: until then, thread-local memory is not touched.
FASTAMP_API extern std::atomic<bool> g_float8_was_used;

FASTAMP_API const Float8Setting* thread_float8_slow(c10::DeviceType device) noexcept;
FASTAMP_API void set_thread_float8_slow(c10::DeviceType device,
                                        const Float8Setting* setting) noexcept;

/// Returns the setting of this thread's regions for a device, suspended or not; null if none.
inline const Float8Setting* thread_float8(c10::DeviceType device) noexcept {
  return g_float8_was_used.load(std::memory_order_relaxed) ? thread_float8_slow(device) : nullptr;
}
inline void set_thread_float8(c10::DeviceType device, const Float8Setting* setting) noexcept {
  if (setting != nullptr || g_float8_was_used.load(std::memory_order_relaxed)) {
    set_thread_float8_slow(device, setting);
  }
}

/// The setting of a region with this recipe and base dtype. Null, after a warning, on a GPU or in a
/// build that has no fp8 products: the region then runs in its base dtype. On the CPU it warns,
/// once, that fp8 is slow there.
/// @param function  The function that errors and warnings name as their source.
/// @throws c10::ValueError if the device, the recipe or the base dtype is not possible.
FASTAMP_API const Float8Setting* float8_of_region(const char* function, c10::DeviceType device,
                                                  const Float8Recipe& recipe,
                                                  c10::ScalarType base_dtype);

/// @throws c10::ValueError if a region's dtype is an fp8 format other than float8_e4m3fn, the one
///     that stands for a default recipe.
FASTAMP_API void check_float8_dtype(const char* function, c10::ScalarType dtype);

/// Whether torch's state of this device type, which torch may have no devices of, is only a copy of
/// the settings in force: float8/dynamo_guard_state.h says what for.
constexpr bool is_float8_mirror(c10::DeviceType device) {
  return device == c10::kMAIA || device == c10::kIPU;
}

// -- Kernels of ops

const Float8Setting* float8_in_force_slow(PolicyDevice device);

/// Returns what ops on the device follow now, within a region that is on: a setting is suspended
/// while the region's dtype is not its base dtype.
inline const Float8Setting* float8_in_force(PolicyDevice device) {
  return g_float8_was_used.load(std::memory_order_relaxed) ? float8_in_force_slow(device) : nullptr;
}

constexpr bool can_run_in_float8(OpId op) {
  return op == OpId::linear || op == OpId::addmm || op == OpId::mm || op == OpId::matmul;
}

template <OpId kOp>
using OpTag = std::integral_constant<OpId, kOp>;

/// The op's result, or an undefined tensor if the product stays in the base dtype; an open trace is
/// notified why. The key of autocast is excluded.
at::Tensor run_in_float8(OpTag<OpId::linear> op, PolicyDevice device, const Float8Setting& setting,
                         const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias);
at::Tensor run_in_float8(OpTag<OpId::mm> op, PolicyDevice device, const Float8Setting& setting,
                         const at::Tensor& x, const at::Tensor& weight);
at::Tensor run_in_float8(OpTag<OpId::matmul> op, PolicyDevice device, const Float8Setting& setting,
                         const at::Tensor& x, const at::Tensor& weight);
at::Tensor run_in_float8(OpTag<OpId::addmm> op, PolicyDevice device, const Float8Setting& setting,
                         const at::Tensor& bias, const at::Tensor& x, const at::Tensor& weight,
                         const c10::Scalar& beta, const c10::Scalar& alpha);

// -- Casts that end with a region: thread_cache.h holds them and knows when that is.

/// Layouts that products want of a matrix in fp8.
struct Float8Wanted {
  bool rows = false;
  bool columns = false;
  bool column_sums = false;

  /// Layout of the transpose.
  Float8Wanted transposed() const { return {.rows = columns, .columns = rows}; }
};

/// The fp8 casts of one thread's regions.
class RegionFloat8Casts;

std::shared_ptr<RegionFloat8Casts> make_region_float8_casts();
bool is_empty(const RegionFloat8Casts& casts);
/// Drops them all: their region ends.
void clear_float8_casts(RegionFloat8Casts& casts) noexcept;
/// Drops those of some weights, which may be dead.
void forget_float8_casts(RegionFloat8Casts& casts,
                         const std::vector<const c10::TensorImpl*>& weights);

// -- Casts that outlive regions: KeptCastStore knows of which weights. Called without its lock.

void drop_kept_float8_casts();
void drop_kept_float8_casts(const c10::TensorImpl* weight) noexcept;
KeptCasts count_kept_float8_casts();

}  // namespace fastamp::autocast
