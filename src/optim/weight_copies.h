// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/interception.h"
#include "float8/float8_cast.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

// Kept casts of weights that the steps of optimizers write. Exported for the Python module.
namespace fastamp::autocast {

/// An optimizer's request to the KeptCastStore to keep the casts of its weights, so that its steps
/// can write them along with the weights. Keeps no weight alive. Not thread-safe.
class FASTAMP_API WeightCopies {
 public:
  WeightCopies();
  ~WeightCopies();
  WeightCopies(const WeightCopies&) = delete;
  WeightCopies& operator=(const WeightCopies&) = delete;
  WeightCopies(WeightCopies&&) = delete;
  WeightCopies& operator=(WeightCopies&&) = delete;

 private:
  friend class CopyingStep;
  void end();

  std::uint64_t id_;
  bool ended_ = false;
};

/// One step of an optimizer over weights with copies: kept casts that the step writes, so that the
/// next region finds them and casts nothing.
///
/// open() the weights, step each and its copy once, finish(). A copy is its weight's cast from
/// before the step, since it is not known here whether the device skips the step. It cannot be
/// found while it is written; without finish() it is dropped, and the next region casts.
class FASTAMP_API CopyingStep {
 public:
  /// @param weight_copies  The optimizer's, or null: no weight has a copy then.
  explicit CopyingStep(WeightCopies* weight_copies) : copies_(weight_copies) {}

  /// The copy of a weight, to be written by the step; undefined where it has none: no region has
  /// used its cast yet, a cast of it cannot be kept, or a CUDA graph is captured.
  /// @param weight  Borrowed until finish().
  /// @param to  Half, BFloat16, or Float8_e4m3fn: then the copy is fp8 if a region used that, else
  ///            of the 16-bit dtype that a region used.
  at::Tensor open(const at::Tensor& weight, c10::ScalarType to);

  /// Keeps the copies. Call it when the step is done or queued. What cannot be kept for want of
  /// memory is dropped, and nothing is thrown for it: the step has been made.
  void finish();

 private:
  struct Opened {
    const at::Tensor* weight;
    at::Tensor cast;
    Float8Cast float8;  ///< If the copy is fp8: `cast` is its rows.
    c10::ScalarType to;
    std::uint32_t weight_version;
    std::uint32_t cast_version;
  };

  at::Tensor open_16_bit(const at::Tensor& weight, c10::ScalarType to, CallPath path);
  at::Tensor open_float8(const at::Tensor& weight);
  void keep_written();
  static void finish_float8(const std::vector<Opened>& written);

  WeightCopies* copies_;
  std::vector<Opened> opened_;
};

}  // namespace fastamp::autocast
