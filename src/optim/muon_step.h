// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/newton_schulz.h"
#include "optim/step_lists.h"

#include <fastamp/macros.h>
#include <fastamp/optim/muon_rate.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_set>
#include <vector>

namespace fastamp::optim {

/// Hyperparameters of a parameter group.
struct MuonGroup {
  double lr = 0.0;
  at::Tensor lr_tensor;  ///< Replaces lr where it is defined.
  double momentum = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  MuonRate rate = MuonRate::kOriginal;
  NewtonSchulz iteration;
};

/// Factor by which a shape multiplies the learning rate with.
FASTAMP_API double muon_rate_ratio(MuonRate rate, std::int64_t rows, std::int64_t columns);

/// A matrix of which each rank holds a shard. Both calls are made by all ranks, for the same
/// matrices in the same order.
class MuonShards {
 public:
  MuonShards() = default;
  MuonShards(const MuonShards&) = delete;
  MuonShards& operator=(const MuonShards&) = delete;
  virtual ~MuonShards() = default;

  /// The whole matrix whose shard this rank has.
  virtual at::Tensor whole(const at::Tensor& shard) = 0;
  /// Returns this rank's shard of it. Communicates nothing.
  virtual at::Tensor shard(const at::Tensor& whole) = 0;
};

/// Collects the parameters of one Muon step, then runs it: momentum of many matrices in one fused
/// op, Newton-Schulz over batches of those of equal shape, and one fused op that changes the
/// parameters. Matrices go through in waves: scratch memory is that of one.
///
/// begin_group() for each group, add() for each of its parameters that has a gradient, run(). Not
/// thread-safe.
class FASTAMP_API MuonStep {
 public:
  void begin_group(const MuonGroup& group);

  /// @param param   A matrix, or this rank's shard of one.
  /// @param master  Of a 16-bit parameter: its master or its remainder. Else ignored.
  /// @param noise_origin,momentum_step  As in ops::muon_momentum_; a negative origin and an
  ///                undefined counter where the buffer is float32.
  /// @param shards  How to put the matrix together, and its rows and columns; null for a whole one.
  /// @returns False if the parameter was added before: it is stepped once, at its first position.
  bool add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& momentum_buffer,
           const at::Tensor& master, std::int64_t noise_origin = -1,
           const at::Tensor& momentum_step = {}, std::shared_ptr<MuonShards> shards = nullptr,
           at::IntArrayRef whole = {});

  /// A 16-bit copy of the parameter added last, float32, that the step is to write.
  void add_copy(const at::Tensor& param, at::Tensor weight_copy);

  /// Steps all parameters, or none: everything is checked before the first op.
  /// @throws c10::TypeError, c10::ValueError  as ops::muon_momentum_ and muon_apply_. Nothing was
  ///     changed.
  void run(const AmpStep& amp_step);

 private:
  struct Matrix {
    at::Tensor param;
    at::Tensor grad;
    at::Tensor buffer;
    at::Tensor master;
    std::int64_t noise_origin;
    at::Tensor momentum_step;
    at::Tensor weight_copy;
    std::shared_ptr<MuonShards> shards;
  };
  /// Matrices of one group, device, shape and layout.
  struct Batch {
    const MuonGroup* group;
    c10::Device device;
    std::int64_t rows;
    std::int64_t columns;
    bool by_columns;  ///< They lie column by column.
    std::vector<Matrix> matrices;
    at::Tensor updates{};  ///< While its wave runs: all of them.
  };
  class Lists;
  using Wave = std::vector<Batch*>;

  Batch& batch_for(const at::Tensor& param, std::int64_t rows, std::int64_t columns, bool is_shard);
  std::vector<Wave> waves();
  static void check(const Wave& wave, const AmpStep& amp_step);
  static void run_wave(const Wave& wave, const AmpStep& amp_step);

  std::deque<MuonGroup> groups_;  // Not a vector: batches point into it.
  std::deque<Batch> batches_;
  Batch* last_ = nullptr;
  std::unordered_set<const c10::TensorImpl*> known_;
};

}  // namespace fastamp::optim
