// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"
#include "scaler/gradient_ranges.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp::scaler {

/// Counters: where the passes over one set of gradients on one device count inf and NaN.
struct NonFiniteCounts {
  c10::Device device;
  std::vector<std::uint32_t> positions;  ///< Position among the parameters of each row.
  at::Tensor counts;  ///< int64 [rows, 2]: inf and NaN at the last overflow; 0 before the first.
};

/// Buffers: what the passes of one optimizer write to, kept from pass to pass.
///
/// Counters: the operators write counters only at an overflow: they hold the last one's as long
/// as they are not given to another set of gradients: there is one buffer for each set met
/// (parameters of which some have no gradient now and then), for the few sets met last. Not
/// thread-safe.
class FASTAMP_API PassBuffers {
 public:
  /// Returns the counters for gradients of these parameters, new ones if they are met first.
  std::shared_ptr<const NonFiniteCounts> counts_for(c10::Device device,
                                                    const std::vector<std::uint32_t>& positions);

  /// Returns 1 / scale, and a place for a sum of squares on inv_scale's device. In ordinary host
  /// memory those of the pass before are used again, unless somebody still holds them.
  at::Tensor inverse_of(const at::Tensor& scale);
  at::Tensor sum_beside(const at::Tensor& inv_scale);

  /// Returns a place for a flag beside the scale, in the same way.
  at::Tensor flag_beside(const at::Tensor& scale);

  /// Returns a norm as fp32 in ordinary host memory, in the same way.
  at::Tensor norm_of(double norm);

 private:
  at::Tensor inverse_;
  at::Tensor sum_;
  at::Tensor flag_;
  at::Tensor norm_;
  std::vector<std::shared_ptr<const NonFiniteCounts>> entries_;  // the one used last in front
};

/// Results of a pass on one device. Tensors have one element and live there.
struct DeviceResult {
  DeviceGradients seen;       ///< The gradients themselves, until forget().
  at::Tensor inv_scale;       ///< fp32: what they were, or are still to be, multiplied by.
  at::Tensor found_inf;       ///< fp32: non-zero if one is inf or NaN.
  at::Tensor sum_of_squares;  ///< fp64, of the unscaled gradients; undefined: not computed.
  at::Tensor total_norm;      ///< fp32; undefined unless the pass was asked for clip_coef.
  at::Tensor clip_coef;       ///< fp32; the same.
  std::shared_ptr<const NonFiniteCounts> counts;  ///< Null: not counted.
  std::vector<std::uint32_t> versions;            ///< Of the gradients, after the pass.
};

/// Ways in which a pass treats the flag that it is given.
enum class FlagUse : std::uint8_t {
  kCopy,       ///< Raises copies of it; the flag itself is not written.
  kRaise,      ///< Raises it on its own device, and copies of it on others.
  kOverwrite,  ///< It may be without a value: writes 0 or 1, on other devices to their flags.
};

/// Arguments that both kinds of passes take.
struct PassOptions {
  FlagUse flag = FlagUse::kCopy;
  PassBuffers* buffers = nullptr;    ///< Counts inf and NaN of each gradient there.
  GradientRanges* ranges = nullptr;  ///< Counts zeros and exponents there when it is their turn.
  std::int64_t step = 0;             ///< Number of the iteration, for ranges.
};

/// Result: what one pass over the gradients of an optimizer learned.
///
/// It keeps the gradients alive until forget(), which is what makes holds() certain: an address
/// cannot come back as another gradient. Not thread-safe.
class FASTAMP_API PassResult {
 public:
  /// Makes one of no gradients, before a pass, which it is then assigned.
  PassResult() = default;
  PassResult(const PassResult&) = delete;
  PassResult& operator=(const PassResult&) = delete;
  PassResult(PassResult&&) = default;
  PassResult& operator=(PassResult&&) = default;
  ~PassResult() { forget(); }

  const std::vector<DeviceResult>& devices() const { return devices_; }

  /// Whether these are the pass's gradients, all of them, in any order and unchanged since. Edits
  /// that bump no version counter (`.data`, collectives) are not seen.
  bool holds(const std::vector<DeviceGradients>& gradients) const;

  /// Whether these are they, moreover in the order and at the positions that the pass has them.
  bool lists(const std::vector<DeviceGradients>& gradients) const;

  /// Whether this is one of the pass's gradients, whatever was done to it since.
  bool saw(const at::Tensor& gradient) const;

  /// Whether no gradient was changed since. Edits that bump no version counter are not seen.
  bool unchanged() const;

  /// Whether the squares of all gradients were summed.
  bool has_norm() const;

  /// Returns the 2-norm of the unscaled gradients if there is one device, and the sum is in
  /// ordinary host memory.
  std::optional<double> host_norm() const;

  /// Returns the 2-norm of the unscaled gradients over all devices, rounded once to `dtype`, on the
  /// first device. Needs has_norm() and a gradient. No synchronisation.
  at::Tensor total_norm(at::ScalarType dtype) const;

  /// Lets the gradients go; holds() is false from then on. Needs no memory.
  void forget() noexcept;

 private:
  friend class GradientPass;

  std::vector<DeviceResult> devices_;
  std::vector<std::vector<at::Tensor>> dying_;  ///< Room for what forget() lets go, by device.
  bool comparable_ = true;  ///< The versions show whether a gradient was changed.
};

/// Multiplies gradients by inv_scale, in place, and says what was inf or NaN: one call of an
/// operator, or of its CPU kernel, per device. Sums the squares of what is left. Asynchronous on
/// CUDA. If it throws, because there is no memory, it has written no gradient of the device that
/// it threw for, or of those that come after it.
/// @param inv_scale  fp32, one element: 1 / scale.
/// @param found_inf  fp32, one element: where the flag of each device starts from; see FlagUse.
FASTAMP_API PassResult unscale(std::vector<DeviceGradients> gradients, const at::Tensor& inv_scale,
                               const at::Tensor& found_inf, const PassOptions& options);

/// Whether check() works for these gradients: there are kernels for all of them.
FASTAMP_API bool can_check(const std::vector<DeviceGradients>& gradients);

/// Finds out the same, norm included, of gradients that it leaves as they are. They must be ones
/// that can_check() is true of.
/// @param max_norm  Compute clip_coef for this norm; on one device only.
FASTAMP_API PassResult check(std::vector<DeviceGradients> gradients, const at::Tensor& inv_scale,
                             const at::Tensor& found_inf, const PassOptions& options,
                             std::optional<double> max_norm = std::nullopt);

/// Returns the 2-norm of gradients that some of the passes hold, unchanged, and together exactly
/// them; none if there are no such passes. No synchronisation.
FASTAMP_API std::optional<at::Tensor> norm_of_passes(const std::vector<const PassResult*>& passes,
                                                     const std::vector<DeviceGradients>& gradients,
                                                     at::ScalarType dtype);

/// Passes of unscale_ whose gradients may still be as the pass left them: fastamp.clip_grad_norm_,
/// which knows of no scaler, takes their norms. A pass holds its gradients only until the step, so
/// one without them matches nothing. Used by Python's front end, on any thread: another
/// may let go of the gradients of its own passes at any time.
class FASTAMP_API RecentPasses {
 public:
  /// The process's only one. Never destroyed: daemon threads may be at work while it exits.
  static RecentPasses& get();

  void remember(const std::shared_ptr<PassResult>& pass);

  /// The norm of gradients that some of the passes hold, unchanged and together exactly them.
  std::optional<at::Tensor> norm_of(const std::vector<DeviceGradients>& gradients,
                                    at::ScalarType dtype) const;

 private:
  std::array<std::weak_ptr<const PassResult>, 4> passes_;
  std::size_t next_ = 0;
};

/// Whether a gradient is listed twice.
FASTAMP_API bool has_duplicates(const std::vector<DeviceGradients>& gradients);

}  // namespace fastamp::scaler
