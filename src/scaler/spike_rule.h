// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/step_guard_options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace fastamp::scaler {

/// Says which gradient norms are far above those before, on the device of the norms and without
/// waiting for it. Used by the step guards of both languages. Not thread-safe.
///
/// A norm is a spike if it is above `factor` times the median of the last `window` finite norms
/// (the lower one of two), or times their running mean, in which the newest of n norms weighs
/// 1 / min(n, window). Of the first min(window, 16) finite norms none is. Every finite norm enters
/// afterwards, spikes too; in a mean they weigh as if they were at the bound.
class FASTAMP_API SpikeRule {
 public:
  /// @throws c10::ValueError for a factor that is not a finite number above 1, or a window outside
  ///     2 .. 65536.
  /// @param function  Named in errors.
  SpikeRule(const char* function, const SpikeOptions& options);

  /// Raises flags if a norm is a spike, and takes it in.
  /// @param norm   One element.
  /// @param flags  fp32 of one element each, on any devices.
  void judge(const at::Tensor& norm, std::vector<at::Tensor>& flags);

  /// Returns what it remembers. sync: waits for the device.
  SpikeState state() const;
  /// Goes on from that.
  /// @throws c10::ValueError if it does not fit the options, or says what state() cannot.
  void load(const char* function, SpikeState state);

 private:
  void prepare(c10::Device device);
  at::Tensor typical() const;
  void take_in(const at::Tensor& norm, const at::Tensor& bounded);

  SpikeOptions options_;
  SpikeState start_;  ///< Until there are tensors.
  at::Tensor
      values_;        ///< fp32: [window] norms, infinite where there is none yet; or [1], the mean.
  at::Tensor count_;  ///< int64 [1]: finite norms so far.
};

}  // namespace fastamp::scaler
