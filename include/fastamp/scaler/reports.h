// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/ops/number_range.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace fastamp {

/// One iteration in the history of a GradScaler.
struct StepRecord {
  int64_t step = 0;            ///< Number of the iteration, from 0.
  double scale = 0.0;          ///< The scale that it used.
  bool skipped = false;        ///< Whether a gradient was inf or NaN.
  double norm = 0.0;           ///< 2-norm of all unscaled gradients before clipping; NaN: unknown.
  int64_t growth_tracker = 0;  ///< Clean iterations since the scale last moved, after this one.
};

/// A parameter whose gradient was not finite.
struct NonFiniteGradient {
  std::string name;            ///< From the names given, else "parameter 3".
  std::size_t index = 0;       ///< Position among all parameters of the optimizer, from 0.
  std::vector<int64_t> shape;  ///< Of the parameter; empty too if it is gone.
  int64_t inf = 0;             ///< Elements that were inf or -inf, or are when they are unscaled.
  int64_t nan = 0;             ///< Elements that were NaN.
};

/// Gradients that were not finite at the last skipped iteration.
struct FASTAMP_API OverflowReport {
  int64_t step = -1;                         ///< As in StepRecord; -1: none was skipped.
  double scale = 0.0;                        ///< The scale that it used.
  std::vector<NonFiniteGradient> gradients;  ///< In the order of the optimizers' first use in
                                             ///< the iteration, and of their parameters.

  explicit operator bool() const { return step >= 0; }
  /// A sentence, and a line for each gradient, most non-finite elements first.
  std::string str() const;
};

/// A parameter whose gradient had zeros.
struct ZerosOfGradient {
  std::string name;            ///< From the names given, else "parameter 3".
  std::size_t index = 0;       ///< Position among all parameters of the optimizer, from 0.
  std::vector<int64_t> shape;  ///< Of the parameter; empty too if it is gone.
  int64_t zeros = 0;           ///< Elements that were 0,
  int64_t elements = 0;        ///< of so many that were counted.
};

/// Gradient elements that were 0, at the step that was counted last.
///
/// A gradient that is too small for fp16 arrives as 0. So does one that is 0 by nature: of a unit
/// that a ReLU has turned off, of a row of an embedding that the batch does not use. Of an
/// optimizer with 65536 elements or more a sample is counted: as many blocks of 2048 as have 32768
/// elements, and at least each 128th, others at each time. Gradients with none in it are left out.
struct FASTAMP_API UnderflowReport {
  int64_t step = -1;                       ///< As in StepRecord; -1: none was counted yet.
  double scale = 0.0;                      ///< That the gradients carried.
  std::vector<ZerosOfGradient> gradients;  ///< Those with zeros, in the optimizers' order.
  NumberRange range;                       ///< Of all that were counted, with the scale in them.
  int64_t elements = 0;                    ///< Of all these gradients, counted or not.

  explicit operator bool() const { return step >= 0; }
  /// Share of the elements, from 0 to 1, that are 0 or would be in fp16 at another scale. What is 0
  /// already counts as 0 at any scale: whether a larger one would have saved it is not known.
  /// @param other  A scale; what counts is the power of two next to its ratio to `scale`.
  double share_of_zeros(double other) const;
  /// The largest scale, a power of two times `scale`, at which all that was counted is finite in
  /// fp16; 0 if it is all 0. Those of activations may be larger: the scaler does not see them.
  double largest_scale() const;
  /// Some sentences, and a line for each gradient, the largest share of zeros first.
  std::string str() const;
};

/// Prints for people: the report's str(), a line for a record, and a line for each of a history.
FASTAMP_API std::ostream& operator<<(std::ostream& out, const OverflowReport& report);
FASTAMP_API std::ostream& operator<<(std::ostream& out, const UnderflowReport& report);
FASTAMP_API std::ostream& operator<<(std::ostream& out, const StepRecord& record);
FASTAMP_API std::ostream& operator<<(std::ostream& out, const std::vector<StepRecord>& history);

}  // namespace fastamp
