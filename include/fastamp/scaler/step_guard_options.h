// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/agreement.h>
#include <fastamp/scaler/on_skip.h>

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp {

/// Reference that the norm of gradients is compared with, to judge whether it is a spike.
enum class SpikeOf : std::uint8_t {
  kMedian,  ///< The median of the last finite norms.
  kMean,    ///< Their running mean.
};

/// Options: when a norm is a spike.
struct SpikeOptions {
  double factor = 10.0;  ///< Above this many times the norms before; above 1.
  SpikeOf of = SpikeOf::kMedian;
  std::int64_t window = 128;  ///< Of how many norms; 2 to 65536.
};

/// State that is remembered of norms, for a checkpoint.
struct SpikeState {
  std::vector<double>
      norms;               ///< The last `window` finite ones, as they lie in a ring; or the mean.
  std::int64_t count = 0;  ///< Finite norms so far.
};

/// Options of a StepGuard; every setter returns the object, so that they can be chained.
struct FASTAMP_API StepGuardOptions {
  /// Skip steps whose gradient norm is a spike, too. None by default: only what is not finite.
  TORCH_ARG(std::optional<SpikeOptions>, spike) = std::nullopt;
  /// Most steps that may be skipped in a row; at least 0. One more, and step() throws an error that
  /// names the parameters. None by default.
  TORCH_ARG(std::optional<std::int64_t>, max_consecutive) = std::nullopt;
  /// Makes skips known to other ranks, so that all skip: agree_over(process_group), or a lambda as
  /// in <fastamp/scaler/agreement.h>. None by default: no communication.
  TORCH_ARG(FlagAgreement, agreement) = nullptr;
  /// Callback, as if register_on_skip() had been called with it. None by default.
  TORCH_ARG(SkipCallback, on_skip) = nullptr;
  /// Steps that history() remembers, on the device; 0: none, at most 2^24 - 1.
  TORCH_ARG(std::int64_t, history_size) = 128;
};

}  // namespace fastamp
