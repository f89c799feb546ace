// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/scale_ops.h"

#include <fastamp/export.h>
#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace fastamp::scaler {

/// The tensors that an update writes beside the scale, on its device: the ring of past iterations
/// and, on CUDA, 1 / scale. The scale itself belongs to the caller. Not thread-safe.
class FASTAMP_API ScaleHistory {
 public:
  /// @param history_size  Rows of the ring; 0: no ring.
  explicit ScaleHistory(std::int64_t history_size) : history_size_(history_size) {}

  /// Makes the tensors for a scale, in place of those for another one. Costs a comparison where
  /// they are there. A CUDA graph must find them made: made during capture, each replay would reset
  /// them.
  void prepare(const at::Tensor& scale);

  /// 1 / scale if it is kept and nobody has written the scale since; else undefined.
  at::Tensor kept_inverse(const at::Tensor& scale) const;
  /// 1 / scale: the kept one, or a new tensor. Do not write it.
  at::Tensor inv_scale(const at::Tensor& scale) const;
  /// Makes the kept 1 / scale right if somebody wrote the scale: a captured graph reads it there.
  void refresh(const at::Tensor& scale);
  /// Says that the kept 1 / scale was written together with the scale.
  void note_update(const at::Tensor& scale);

  /// Moves the scale after an iteration: see update_scale(). Writes a row of the ring.
  /// @param norm       fp32, one element: of all gradients; may be undefined.
  /// @param new_scale  One element, on any device; undefined: the rules decide.
  void update(ScaleTensors& tensors, const ScaleRules& rules, at::ArrayRef<at::Tensor> flags,
              const at::Tensor& norm, const at::Tensor& new_scale);

  bool keeps_history() const { return history_.defined(); }
  std::int64_t history_size() const { return history_size_; }
  /// Says that the device was told to write a row, by update() or a replay of it.
  void note_row() { ++rows_; }
  /// The row that was noted last: a view of the ring. Only if it keeps a history.
  at::Tensor last_row() const;
  /// The iterations that are kept, oldest first. sync: waits for the device.
  std::vector<StepRecord> history() const;
  /// Replaces the ring by rows of consecutive steps; the last that fit are kept.
  void load_history(std::vector<StepRecord> rows);

 private:
  void write_history();

  std::int64_t history_size_;
  at::Tensor scale_;  ///< What the others were made for.
  at::Tensor inv_scale_;
  std::uint32_t inv_scale_version_ = 0;  ///< The scale's version that inv_scale_ belongs to.
  at::Tensor history_;
  at::Tensor history_count_;
  std::int64_t rows_ = 0;  ///< history_count_ as it will be when the device has come that far.
  std::vector<StepRecord> loaded_;
};

}  // namespace fastamp::scaler
