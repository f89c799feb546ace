#pragma once

#include "scaler/gradient_groups.h"
#include "scaler/pass_memory.h"

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace fastamp::scaler {

/// What a pass learned on one device. Tensors have one element and live there.
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

struct PassOptions {
  bool read_only = false;          ///< Check without unscaling.
  bool own_flag = false;           ///< found_inf is fresh and may be written itself.
  bool with_norm = true;           ///< Sum the squares.
  std::optional<double> max_norm;  ///< Read-only passes on one device: compute clip_coef.
  PassMemory* memory = nullptr;    ///< Counts inf and NaN of each gradient there.
};

/// One pass over the gradients of an optimizer, and what it learned.
///
/// It keeps the gradients alive until forget(), which is what makes holds() certain: an address
/// cannot come back as another gradient. Not thread-safe.
class FASTAMP_API GradientPass {
 public:
  /// Runs the pass: one call of an operator, or of its CPU kernel, per device. Asynchronous on
  /// CUDA.
  /// @param groups     The gradients; fp64 ones are refused in a read-only pass, as are devices
  ///                   that we have no kernels for.
  /// @param inv_scale  fp32, one element: 1 / scale.
  /// @param found_inf  fp32, one element: where the flag of each device starts from.
  GradientPass(std::vector<DeviceGradients> groups, const at::Tensor& inv_scale,
               const at::Tensor& found_inf, const PassOptions& options);
  GradientPass(const GradientPass&) = delete;
  GradientPass& operator=(const GradientPass&) = delete;
  GradientPass(GradientPass&&) = default;
  GradientPass& operator=(GradientPass&&) = default;
  ~GradientPass() { forget(); }

  const std::vector<DeviceResult>& devices() const { return devices_; }

  /// Whether these are the pass's gradients, all of them, in any order and unchanged since. Edits
  /// that bump no version counter (`.data`, collectives) are not seen.
  bool holds(const std::vector<DeviceGradients>& gradients) const;

  /// Whether this is one of the pass's gradients, whatever was done to it since.
  bool saw(const at::Tensor& gradient) const;

  /// Whether no gradient was changed since. Edits that bump no version counter are not seen.
  bool unchanged() const;

  /// Whether the squares of all gradients were summed.
  bool has_norm() const;

  /// Returns the 2-norm of the unscaled gradients over all devices, rounded once to `dtype`, on the
  /// first device. Needs has_norm() and a gradient. No synchronisation.
  at::Tensor total_norm(at::ScalarType dtype) const;

  /// Lets the gradients go; holds() is false from then on.
  void forget();

 private:
  void run(DeviceResult& result, const PassOptions& options) const;
  static void run_unscale(DeviceResult& result, const std::optional<at::Tensor>& counts);
  static void run_check(DeviceResult& result, const std::optional<at::Tensor>& counts,
                        std::optional<double> max_norm);
  void take_versions(DeviceResult& result, bool bump);

  std::vector<DeviceResult> devices_;
  bool comparable_ = true;
};

/// Whether PassOptions::read_only works for these gradients: there are kernels for all of them.
FASTAMP_API bool has_read_only_pass(const std::vector<DeviceGradients>& gradients);

/// Returns the 2-norm of gradients that some of the passes hold, unchanged, and together exactly
/// them; none if there are no such passes. No synchronisation.
FASTAMP_API std::optional<at::Tensor> norm_of_passes(const std::vector<const GradientPass*>& passes,
                                                     const std::vector<DeviceGradients>& gradients,
                                                     at::ScalarType dtype);

/// Whether a gradient is listed twice.
FASTAMP_API bool has_duplicates(const std::vector<DeviceGradients>& gradients);

/// Returns min(1, max_norm / (total_norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ computes it, in
/// total_norm's dtype. No synchronisation.
FASTAMP_API at::Tensor clip_coefficient(const at::Tensor& total_norm, double max_norm);

/// Multiplies gradients in place by a factor of one element, which is copied to each device met.
/// A factor of 1 writes nothing where we have kernels.
FASTAMP_API void multiply_(const std::vector<DeviceGradients>& groups, const at::Tensor& factor);

}  // namespace fastamp::scaler
