// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp::scaler {

/// Numbers that say how a scale moves; they belong to the host and may change between updates.
struct ScaleRules {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  int64_t hysteresis = 1;
  std::optional<double> min_scale;
  std::optional<double> max_scale;
  int64_t fast_growth_interval = 0;  ///< 0: growth is never fast.
};

/// The tensors an update reads and writes: scale fp32, the trackers int32, all of one element and
/// on one device. `hysteresis_tracker` is undefined while hysteresis is 1, `fast_growth_limit`
/// (fp32) while growth is never fast.
struct ScaleTensors {
  at::Tensor scale;
  at::Tensor growth_tracker;
  at::Tensor hysteresis_tracker;
  at::Tensor fast_growth_limit;
};

/// Tensors that an update may write besides, each undefined if it is not wanted; all on scale's
/// device.
struct ScaleRecords {
  at::Tensor inv_scale;      ///< fp32, one element: receives 1 / the new scale.
  at::Tensor norm;           ///< fp32, one element: norm of the step's gradients, for the history.
  at::Tensor history;        ///< fp32 [capacity, 4]: receives a row, see ops::update_scale_.
  at::Tensor history_count;  ///< int64, one element: rows written so far.
  at::Tensor new_scale;      ///< fp32, one element: replaces the scale; the trackers stay.
};

/// Returns 1 / scale as an fp32 tensor on scale's device. The division is done in fp64 and rounded
/// once, which is what keeps unscaled gradients bit-equal to torch.amp's. No synchronisation.
FASTAMP_API at::Tensor inverse_scale(const at::Tensor& scale);

/// Reads it into a scalar of ordinary host memory.
FASTAMP_API void write_inverse(float scale, const at::Tensor& inverse);

/// Returns a zero fp32 scalar on `scale`'s device: a non-finite flag that nobody has raised yet.
FASTAMP_API at::Tensor new_flag(const at::Tensor& scale);

/// Returns the same for a pass that overwrites it. On CUDA this launches nothing.
FASTAMP_API at::Tensor flag_without_value(const at::Tensor& scale);

/// Whether a flag of an earlier pass, of a scale beside it in ordinary host memory, may be
/// overwritten by the next: nobody else holds it or its memory.
FASTAMP_API bool is_spare_flag(const at::Tensor& flag, const at::Tensor& scale);

/// Returns a scalar without a value on `like`'s device. In ordinary host memory no operator is
/// called: one costs three times the allocation.
FASTAMP_API at::Tensor new_scalar(const at::Tensor& like, at::ScalarType dtype);

/// Returns one fp32 scalar on `device` that is non-zero if any of `flags` is. The flags themselves
/// are never written; a single flag that is already there is returned as it is.
FASTAMP_API at::Tensor combine_flags(at::ArrayRef<at::Tensor> flags, c10::Device device);

/// Returns it as a new tensor whose value is exactly 0 or 1, for code that compares it with 1.
FASTAMP_API at::Tensor binary_flag(at::ArrayRef<at::Tensor> flags, c10::Device device);

/// Moves `state.scale` by `rules`, or to records.new_scale, after an iteration whose flags are
/// `flags` (not empty).
FASTAMP_API void update_scale(ScaleTensors& state, const ScaleRules& rules,
                              at::ArrayRef<at::Tensor> flags, const ScaleRecords& records = {});

/// Whether a tensor is one element of ordinary host memory, which may be read and written without
/// an operator: not for fake and wrapped tensors, nor where a dispatch mode must see operators.
FASTAMP_API bool is_plain_cpu_scalar(const at::Tensor& tensor, at::ScalarType dtype);

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
  /// Notes that the kept 1 / scale was written together with the scale.
  void note_update(const at::Tensor& scale);

  /// Moves the scale after an iteration: see update_scale(). Writes a row of the ring.
  /// @param norm       fp32, one element: of all gradients; may be undefined.
  /// @param new_scale  One element, on any device; undefined: the rules decide.
  void update(ScaleTensors& tensors, const ScaleRules& rules, at::ArrayRef<at::Tensor> flags,
              const at::Tensor& norm, const at::Tensor& new_scale);

  bool keeps_history() const { return history_.defined(); }
  std::int64_t history_size() const { return history_size_; }
  /// Notes that the device was asked to write a row, by update() or a replay of it.
  void note_row() { ++rows_; }
  /// The row that is written next: a view of the ring. Only if it keeps a history.
  at::Tensor next_row() const;
  /// The iterations that are kept, oldest first. sync: waits for the device.
  std::vector<StepRecord> history() const;
  /// Replaces the ring by rows of consecutive steps; the last that fit are kept.
  void load_history(std::vector<StepRecord> rows);

 private:
  /// Fills a ring, and the count of its rows, with those that were loaded.
  void write_history(const std::vector<StepRecord>& loaded, const at::Tensor& history,
                     const at::Tensor& count) const;

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
