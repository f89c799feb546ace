// SPDX-License-Identifier: Apache-2.0
#include "optim/muon_step.h"

#include "core/dtypes.h"
#include "ops/checks.h"

#include <fastamp/ops/fused_steps.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace fastamp::optim {
namespace {

/// Elements of a batch, and of a wave, unless one matrix has more. More matrices at a time would
/// make nothing faster: products of this size keep a device busy. In bfloat16 64 MiB.
constexpr std::int64_t kWaveNumel = 32LL * 1024 * 1024;

bool lies_by_columns(const at::Tensor& param) {
  return !param.is_contiguous() && param.t().is_contiguous();
}

at::Tensor updates_for(const at::Tensor& like, at::IntArrayRef sizes, bool by_columns,
                       at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(like.device());
  if (!by_columns) {
    return at::empty(sizes, options);
  }
  std::vector<std::int64_t> exchanged(sizes.begin(), sizes.end());
  std::swap(exchanged.end()[-1], exchanged.end()[-2]);
  return at::empty(exchanged, options).transpose(-1, -2);
}

/// Whether the host knows that nothing will be stepped. Shards are gathered all the same: other
/// ranks may not know.
bool is_skipped_on_host(const AmpStep& here) {
  return here.found_inf && here.found_inf->is_cpu() && !steps_on_host(here);
}

}  // namespace

double muon_rate_ratio(MuonRate rate, std::int64_t rows, std::int64_t columns) {
  const auto height = static_cast<double>(rows);
  const auto width = static_cast<double>(columns);
  switch (rate) {
    case MuonRate::kOriginal:
      return std::sqrt(std::max(1.0, height / width));
    case MuonRate::kMatchRmsAdamW:
      return 0.2 * std::sqrt(std::max(height, width));
    case MuonRate::kSpectralUnclamped:
      return std::sqrt(height / width);
    case MuonRate::kNone:
      break;
  }
  return 1.0;
}

/// A wave as the ops take it: each batch is a group of theirs.
class MuonStep::Lists {
 public:
  explicit Lists(const Wave& wave) {
    for (const auto* batch : wave) {
      group_sizes_.push_back(static_cast<std::int64_t>(batch->matrices.size()));
      momentum_.push_back(batch->group->momentum);
      nesterov_.push_back(batch->group->nesterov);
      lr_.push_back(batch->group->lr);
      ratio_.push_back(muon_rate_ratio(batch->group->rate, batch->rows, batch->columns));
      weight_decay_.push_back(batch->group->weight_decay);
      any_rate_ = any_rate_ || batch->group->lr_tensor.defined();
      for (const auto& matrix : batch->matrices) {
        add(matrix);
      }
    }
    if (any_rate_) {
      for (const auto* batch : wave) {
        const auto& group = *batch->group;
        rates_.push_back(rate_tensor(group.lr_tensor, group.lr, batch->device));
      }
    }
  }

  ops::MuonMomentumArgs momentum_args(at::TensorList updates, const AmpStep& amp_step) const {
    return {.grads = grads_,
            .momentum_buffers = buffers_,
            .updates = updates,
            .group_sizes = group_sizes_,
            .momentum = momentum_,
            .nesterov = nesterov_,
            .inv_scale = amp_step.inv_scale,
            .clip_coef = amp_step.clip_coef,
            .found_inf = amp_step.found_inf,
            .clip_value = amp_step.clip_value,
            .write_grads = amp_step.write_grads,
            .noise_origins = noise_origins_,
            .momentum_steps = counts_};
  }
  ops::MuonApplyArgs apply_args(at::TensorList updates, const AmpStep& amp_step) const {
    return {.params = params_,
            .updates = updates,
            .masters = masters_,
            .group_sizes = group_sizes_,
            .lr = lr_,
            .ratio = ratio_,
            .weight_decay = weight_decay_,
            .lr_tensors = rates_,
            .weight_copies = copies_,
            .copy_of = copy_of_,
            .found_inf = amp_step.found_inf};
  }

  const std::vector<at::Tensor>& params() const { return params_; }
  const std::vector<at::Tensor>& grads() const { return grads_; }

 private:
  void add(const Matrix& matrix) {
    params_.push_back(matrix.param);
    grads_.push_back(matrix.grad);
    buffers_.push_back(matrix.buffer);
    noise_origins_.push_back(matrix.noise_origin);
    if (matrix.noise_origin >= 0) {
      counts_.push_back(matrix.momentum_step);
    }
    if (is_16_bit(matrix.param)) {
      masters_.push_back(matrix.master);
    }
    if (matrix.weight_copy.defined()) {
      copies_.push_back(matrix.weight_copy);
      copy_of_.push_back(static_cast<std::int64_t>(params_.size()) - 1);
    }
  }

  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> grads_;
  std::vector<at::Tensor> buffers_;
  std::vector<std::int64_t> noise_origins_;
  std::vector<at::Tensor> counts_;
  std::vector<at::Tensor> masters_;
  std::vector<at::Tensor> copies_;
  std::vector<at::Tensor> rates_;
  std::vector<std::int64_t> copy_of_;
  std::vector<std::int64_t> group_sizes_;
  std::vector<double> momentum_;
  std::vector<double> lr_;
  std::vector<double> ratio_;
  std::vector<double> weight_decay_;
  c10::List<bool> nesterov_;
  bool any_rate_ = false;
};

void MuonStep::begin_group(const MuonGroup& group) { groups_.push_back(group); }

MuonStep::Batch& MuonStep::batch_for(const at::Tensor& param, std::int64_t rows,
                                     std::int64_t columns, bool is_shard) {
  const bool by_columns = !is_shard && lies_by_columns(param);
  const auto most =
      std::max<std::int64_t>(1, kWaveNumel / std::max<std::int64_t>(1, rows * columns));
  for (auto& batch : batches_) {
    if (batch.group == &groups_.back() && batch.device == param.device() && batch.rows == rows &&
        batch.columns == columns && batch.by_columns == by_columns &&
        std::cmp_less(batch.matrices.size(), most)) {
      return batch;
    }
  }
  return batches_.emplace_back(
      Batch{&groups_.back(), param.device(), rows, columns, by_columns, {}});
}

bool MuonStep::add(const at::Tensor& param, const at::Tensor& grad,
                   const at::Tensor& momentum_buffer, const at::Tensor& master,
                   std::int64_t noise_origin, const at::Tensor& momentum_step,
                   std::shared_ptr<MuonShards> shards, at::IntArrayRef whole) {
  const auto sizes = shards == nullptr ? param.sizes() : whole;
  TORCH_CHECK_VALUE(sizes.size() == 2, "Muon: expected parameters of two dimensions, got shape ",
                    sizes);
  if (!known_.insert(param.unsafeGetTensorImpl()).second) {
    return false;
  }
  last_ = &batch_for(param, sizes[0], sizes[1], shards != nullptr);
  last_->matrices.push_back(
      {param, grad, momentum_buffer, master, noise_origin, momentum_step, {}, std::move(shards)});
  return true;
}

void MuonStep::add_copy(const at::Tensor& /*param*/, at::Tensor weight_copy) {
  last_->matrices.back().weight_copy = std::move(weight_copy);
}

std::vector<MuonStep::Wave> MuonStep::waves() {
  std::vector<Wave> found;
  std::int64_t numel = 0;
  for (auto& batch : batches_) {
    const auto more = batch.rows * batch.columns * static_cast<std::int64_t>(batch.matrices.size());
    if (found.empty() || found.back().front()->device != batch.device ||
        numel + more > kWaveNumel) {
      found.emplace_back();
      numel = 0;
    }
    found.back().push_back(&batch);
    numel += more;
  }
  return found;
}

void MuonStep::check(const Wave& wave, const AmpStep& amp_step) {
  const Lists lists(wave);
  const auto here = amp_step_on(amp_step, wave.front()->device);
  // Updates are not there yet: gradients and parameters have their shapes.
  std::vector<at::Tensor> stand_ins;
  stand_ins.reserve(lists.params().size());
  for (const auto& param : lists.params()) {
    stand_ins.push_back(param.is_non_overlapping_and_dense() ? param : param.contiguous());
  }
  ops::check_muon_momentum(lists.momentum_args(stand_ins, here));
  ops::check_muon_apply(lists.apply_args(lists.grads(), here));
}

void MuonStep::run_wave(const Wave& wave, const AmpStep& amp_step) {
  const Lists lists(wave);
  const auto here = amp_step_on(amp_step, wave.front()->device);
  std::vector<at::Tensor> updates;
  bool any_shards = false;
  for (auto* batch : wave) {
    const auto dtype = dtype_of_updates(batch->group->iteration);
    const auto count = static_cast<std::int64_t>(batch->matrices.size());
    batch->updates = updates_for(batch->matrices.front().param,
                                 {count, batch->rows, batch->columns}, batch->by_columns, dtype);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& matrix = batch->matrices[static_cast<std::size_t>(i)];
      const bool is_shard = matrix.shards != nullptr;
      any_shards = any_shards || is_shard;
      updates.push_back(is_shard ? updates_for(matrix.param, matrix.param.sizes(), false, dtype)
                                 : batch->updates.select(0, i));
    }
  }
  ops::muon_momentum_(lists.momentum_args(updates, here));
  if (is_skipped_on_host(here) && !any_shards) {
    return;
  }
  std::size_t next = 0;
  for (auto* batch : wave) {
    for (std::size_t i = 0; i < batch->matrices.size(); ++i) {
      if (const auto& shards = batch->matrices[i].shards; shards != nullptr) {
        batch->updates.select(0, static_cast<std::int64_t>(i))
            .copy_(shards->whole(updates[next + i]));
      }
    }
    const auto results = orthogonalized(std::exchange(batch->updates, {}), batch->group->iteration);
    for (std::size_t i = 0; i < batch->matrices.size(); ++i, ++next) {
      const auto result = results.select(0, static_cast<std::int64_t>(i));
      const auto& shards = batch->matrices[i].shards;
      updates[next] = shards == nullptr ? result : shards->shard(result);
    }
  }
  ops::muon_apply_(lists.apply_args(updates, here));
}

void MuonStep::run(const AmpStep& amp_step) {
  const auto all = waves();
  for (const auto& wave : all) {
    check(wave, amp_step);
  }
  for (const auto& wave : all) {
    run_wave(wave, amp_step);
  }
}

}  // namespace fastamp::optim
