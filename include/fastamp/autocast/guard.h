#pragma once

#include <fastamp/export.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace fastamp {

namespace detail {

/// torch's public autocast state for one device, on one thread.
struct AutocastState {
  c10::DeviceType device;
  c10::ScalarType dtype;
  bool enabled;
  bool cache_enabled;
};

}  // namespace detail

/// A mixed-precision region: from construction to destruction, ops on `device` follow fastamp's op
/// table.
///
/// Regions nest in any order, with each other, with torch.autocast and with `enabled = false`. The
/// region is torch's own public state (at::autocast::is_autocast_enabled and the rest tell the
/// truth inside), so autograd's backward threads, TorchScript modules and custom ops follow it.
/// State is thread-local: a region covers the thread that made it.
///
/// @code
///   fastamp::AutocastGuard region(torch::kCUDA, torch::kBFloat16);
///   auto loss = criterion(model->forward(x), y);
/// @endcode
///
/// Cost: about 50 ns; the first guard of the process also calls install().
class FASTAMP_API AutocastGuard {
 public:
  /// @param device         Device type whose ops are autocast; CPU and CUDA run fastamp's kernels,
  /// other autocast
  ///                       devices torch's.
  /// @param dtype          Lower-precision dtype; by default the current autocast dtype of the
  /// device (bfloat16 on
  ///                       CPU, float16 on CUDA unless changed).
  /// @param enabled        false switches autocast off inside the region.
  /// @param cache_enabled  Whether casts of weights are kept until the outermost region ends; by
  /// default as now.
  /// @throws c10::Error if torch has no autocast for `device`. Like torch.autocast, an unsupported
  /// dtype on CPU or a
  ///         CUDA region in a process without CUDA gives a warning and a disabled region instead.
  explicit AutocastGuard(c10::DeviceType device,
                         std::optional<c10::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt);
  ~AutocastGuard();

  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  AutocastGuard(AutocastGuard&&) = delete;
  AutocastGuard& operator=(AutocastGuard&&) = delete;

 private:
  detail::AutocastState saved_;
};

/// Drops the casts of weights that the calling thread's regions have kept so far.
///
/// Needed only after changing a weight in a way its version counter does not show
/// (`weight.data().copy_(...)`) in the middle of a region.
FASTAMP_API void clear_cast_cache();

}  // namespace fastamp
