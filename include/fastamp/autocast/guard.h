// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/float8.h>
#include <fastamp/macros.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace fastamp {

namespace autocast {
struct Float8Setting;
}

namespace detail {

/// torch's public autocast state for one device, on one thread, and fastamp's own beside it.
struct AutocastState {
  c10::DeviceType device;
  c10::ScalarType dtype;
  bool enabled;
  bool cache_enabled;
  bool sets_float8 = false;                         ///< False: the recipe in force stays as it is.
  const autocast::Float8Setting* float8 = nullptr;  ///< Null: no recipe.
};

/// Identifies a region, open or ended; unique in the process.
using RegionId = std::uint64_t;

}  // namespace detail

/// A mixed-precision region: from construction to destruction, ops on `device` follow fastamp's op
/// table.
///
/// Regions nest, with each other, with Python's, with torch.autocast and with `enabled = false`,
/// and may end in any order: the last to end leaves the state as the first one found it. The region
/// is torch's own public state (at::autocast::is_autocast_enabled and the others say the truth
/// inside), so autograd's backward threads, TorchScript modules and custom ops follow it.
///
/// State is thread-local: a region covers the thread that made it, and ends there. Ending it on
/// another thread changes nothing on either and warns once per process. To give a thread pool or
/// the backward of an autograd function the regions of the caller, see AutocastContext.
///
/// @code
///   fastamp::AutocastGuard region(torch::kCUDA, torch::kBFloat16);
///   auto loss = criterion(model->forward(x), y);
/// @endcode
///
/// A weight is cast once while a region is open, and again after its version counter moved.
/// LibTorch's own optimizers do not move it: after a bare `optimizer.step()` in an open region call
/// weights_changed(optimizer). GradScaler::step() does that itself, and optimizers of
/// fastamp::optim never need it.
///
/// Cost: see the row "C++: region" in docs/performance.md. The first guard of the process also
/// calls register_kernels().
class FASTAMP_API AutocastGuard {
 public:
  /// @param device  Device type whose ops are autocast; CPU and CUDA run fastamp's kernels, other
  ///     autocast devices torch's.
  /// @param dtype  Lower-precision dtype; by default the current autocast dtype of the device
  ///     (bfloat16 on CPU, float16 on CUDA unless changed). On CUDA, float8_e4m3fn stands for
  ///     bfloat16 with a default Float8Recipe.
  /// @param enabled  false switches autocast off inside the region.
  /// @param cache_enabled  Whether casts of weights are kept until the outermost region ends; by
  ///     default the current setting.
  /// @throws c10::Error if torch has no autocast for `device`. Like torch.autocast, an unsupported
  ///     dtype on CPU or a CUDA region in a process without CUDA gives a warning and a disabled
  ///     region instead.
  explicit AutocastGuard(c10::DeviceType device,
                         std::optional<c10::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt);
  /// Opens it for a device with an index, such as `model->parameters()[0].device()`: a region
  /// covers all devices of a type.
  explicit AutocastGuard(const c10::Device& device,
                         std::optional<c10::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt)
      : AutocastGuard(device.type(), dtype, enabled, cache_enabled) {}
  /// A region that runs linear layers in fp8, where the recipe and the shapes allow it, and all
  /// else in `dtype`, as a region of that dtype does: docs/float8.md.
  ///
  /// On the CPU this is a reference: exact and slow. On a GPU without fp8 products the constructor
  /// warns and the region runs in `dtype`. In a region inside this one, a dtype given explicitly
  /// ends the recipe, another dtype or `enabled = false` suspends it.
  /// @param device  CPU or CUDA.
  /// @param recipe  How linear layers run.
  /// @param dtype  bfloat16 or float16.
  /// @param enabled  As above.
  /// @param cache_enabled  As above.
  /// @throws c10::ValueError for a recipe or dtype that is not possible; nothing is changed then.
  AutocastGuard(c10::DeviceType device, const Float8Recipe& recipe,
                c10::ScalarType dtype = c10::ScalarType::BFloat16, bool enabled = true,
                std::optional<bool> cache_enabled = std::nullopt);
  AutocastGuard(const c10::Device& device, const Float8Recipe& recipe,
                c10::ScalarType dtype = c10::ScalarType::BFloat16, bool enabled = true,
                std::optional<bool> cache_enabled = std::nullopt)
      : AutocastGuard(device.type(), recipe, dtype, enabled, cache_enabled) {}
  ~AutocastGuard() { release(); }

  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  AutocastGuard(AutocastGuard&&) = delete;
  AutocastGuard& operator=(AutocastGuard&&) = delete;

  /// Ends the region early. Does nothing the second time.
  void release() noexcept;

  c10::DeviceType device_type() const noexcept { return state_.device; }
  /// Lower-precision dtype of the region.
  c10::ScalarType dtype() const noexcept { return state_.dtype; }
  /// Whether the region casts: as requested, unless the constructor warned and disabled it.
  bool enabled() const noexcept { return state_.enabled; }

 private:
  detail::AutocastState state_;
  detail::RegionId id_;
};

/// Drops the casts of weights that the calling thread's regions have kept so far.
///
/// Needed only after changing a weight in a way its version counter does not show
/// (`weight.data().copy_(...)`) in the middle of a region.
FASTAMP_API void clear_cast_cache();

}  // namespace fastamp
