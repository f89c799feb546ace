// SPDX-License-Identifier: Apache-2.0
#include "scaler/scaler_core.h"

#include "core/device_copy.h"
#include "core/tensor_version.h"
#include "scaler/gradient_factors.h"
#include "scaler/step_logger.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fastamp::scaler {
namespace {

std::vector<at::Tensor> flags_of(const PassResult& pass) {
  std::vector<at::Tensor> flags;
  for (const auto& device : pass.devices()) {
    flags.push_back(device.found_inf);
  }
  return flags;
}

at::Tensor norm_of(OptimizerPort& port, const Gathered& gathered, const OptimizerRecord& record,
                   double norm_type) {
  const auto& groups = gathered.groups;
  if (norm_type != 2.0 || gathered.has_foreign) {
    return port.torchs_norm(gathered, norm_type);
  }
  const auto& pass = record.pass;
  if (pass != nullptr && pass->has_norm() && pass->holds(groups)) {
    return pass->total_norm(port.norm_dtype(groups));
  }
  if (!can_check(groups)) {
    return port.torchs_norm(gathered, norm_type);
  }
  const auto one = at::ones({}, at::TensorOptions(at::kFloat).device(groups.front().device));
  return check(groups, one, flag_without_value(one), {.flag = FlagUse::kOverwrite})
      .total_norm(port.norm_dtype(groups));
}

bool any_duplicates(const std::vector<DeviceGradients>& groups) {
  return std::ranges::any_of(groups, &DeviceGradients::any_duplicates);
}

void multiply(OptimizerPort& port, const Gathered& gathered, const at::Tensor& factor) {
  multiply_(gathered.groups, factor);
  if (gathered.has_foreign) {
    port.multiply_foreign(factor);
  }
}

/// The norm over all optimizers of an iteration, fp32; undefined if one's is not known.
at::Tensor total_norm(const std::vector<Outcome>& outcomes, c10::Device home) {
  std::vector<at::Tensor> norms;
  for (const auto& outcome : outcomes) {
    const auto& record = *outcome.record;
    if (record.pass != nullptr && record.pass->devices().empty() && !record.has_foreign) {
      continue;  // It has no gradients: other ranks may.
    }
    const auto norm = record.known_norm();
    if (!norm.defined()) {
      return {};
    }
    norms.push_back(on_device(norm, home, at::kFloat));
  }
  if (norms.size() <= 1) {
    return norms.empty() ? at::Tensor() : norms.front();
  }
  return at::linalg_vector_norm(at::stack(norms));
}

}  // namespace

void agree_on(std::vector<at::Tensor>& flags, const ScalerCall& call) {
  if (call.agreement == nullptr || !*call.agreement) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (flags.empty()) {
    flags.push_back(new_flag(call.scale));
  }
  // Gradients offloaded to the host still have to be agreed on by the device's backend.
  const auto home = call.scale.device();
  const bool offloaded = home.is_cpu() && call.device != c10::kCPU;
  const auto combined = combine_flags(flags, offloaded ? c10::Device(call.device) : home);
  (*call.agreement)(combined);
  for (const auto& flag : flags) {
    if (!flag.is_same(combined)) {
      copy_into(flag, combined);
    }
  }
}

ScalerCore::ScalerCore(double init_scale, std::int64_t history_size)
    : records_(std::make_shared<Records>()), sidecar_(history_size), log_(init_scale) {}

ScalerCore::ScalerCore(double init_scale, const ScalerCore& other)
    : records_(other.records_), sidecar_(0), log_(init_scale) {}

void ScalerCore::load(double scale, std::vector<StepRecord> history,
                      std::int64_t skipped_in_a_row) {
  const auto iterations = history.empty() ? 0 : history.back().step + 1;
  sidecar_.load_history(std::move(history));
  // The end of what was logged may run code of users: the new log is in its place by then.
  const auto before = std::exchange(log_, IterationLog(scale, iterations, skipped_in_a_row));
}

void ScalerCore::log_to(std::shared_ptr<StepLogger> logger) {
  TORCH_CHECK_VALUE(sidecar_.history_size() > 0,
                    "log_to: expected a scaler with history_size above 0, got 0");
  loggers_.push_back(std::move(logger));
}

void ScalerCore::pass_rows_on() {
  const auto loggers = loggers_;  // A callback may log to others, too.
  for (const auto& logger : loggers) {
    logger->pass_on(/*wait=*/false);
  }
  std::erase_if(loggers_, [](const auto& logger) { return logger->is_released(); });
  skip_hooks_.tell(log_.take_skips());
}

RecordPointer ScalerCore::find(std::intptr_t key) const {
  const auto found = records_->find(key);
  return found == records_->end() ? nullptr : found->second;
}

RecordPointer ScalerCore::find(const OptimizerPort& port) const {
  auto record = find(port.key());
  return record != nullptr && port.owns(*record->handle) ? record : nullptr;
}

RecordPointer ScalerCore::record_of(OptimizerPort& port) {
  const auto key = port.key();
  if (auto record = find(key)) {
    if (port.owns(*record->handle)) [[likely]] {
      return record;
    }
    set_aside(key);
  }
  auto record = std::make_shared<OptimizerRecord>();
  record->handle = port.make_handle();
  records_->emplace(key, record);
  return record;
}

std::intptr_t ScalerCore::set_aside(std::intptr_t key) {
  std::intptr_t free = -key;
  while (records_->contains(free)) {
    --free;
  }
  if (auto node = records_->extract(key)) {
    node.key() = free;
    records_->insert(std::move(node));
  }
  return free;
}

bool ScalerCore::scaled_anew(const OptimizerPort& port, const OptimizerRecord& record,
                             const ScalerCall& call) {
  const auto pass = record.pass;
  return pass != nullptr && !record.has_foreign && record.times_scaled != call.times_scaled &&
         port.all_gradients([&](const at::Tensor& gradient) { return !pass->saw(gradient); });
}

void ScalerCore::forget_if_scaled_anew(const OptimizerPort& port, OptimizerRecord& record,
                                       const ScalerCall& call) {
  if (scaled_anew(port, record, call)) {
    const auto earlier = record.start_iteration();
  }
}

at::Tensor ScalerCore::inverse_for(OptimizerRecord& record, const at::Tensor& scale) const {
  auto kept = sidecar_.kept_inverse(scale);
  return kept.defined() ? kept : record.buffers.inverse_of(scale);
}

PassOptions ScalerCore::options_for(OptimizerRecord& record) const {
  return {.flag = FlagUse::kOverwrite,
          .buffers = &record.buffers,
          .ranges = &record.ranges,
          .step = log_.iterations()};
}

void ScalerCore::note_pass(OptimizerRecord& record, std::shared_ptr<PassResult> pass,
                           const ScalerCall& call) {
  const auto earlier = std::exchange(record.pass, std::move(pass));
  ++passes_;
  record.first_pass = record.first_pass != 0 ? record.first_pass : passes_;
  record.times_scaled = call.times_scaled;
  record.inv_scale = record.norm_factor = at::Tensor();
  record.has_foreign = false;
  record.foreign_counts.clear();
}

bool ScalerCore::unscale(OptimizerPort& port, const ScalerCall& call) {
  const auto record = record_of(port);
  forget_if_scaled_anew(port, *record, call);
  port.begin_unscale(*record);
  const auto flag = port.flag_for_pass(*record, call.scale);
  const auto inv_scale = inverse_for(*record, call.scale);
  // No code of users runs between collecting the gradients and the end of the pass.
  auto gathered = port.gather(*record, Purpose::kUnscale);
  if (gathered.has_foreign) {
    return false;
  }
  std::shared_ptr<PassResult> pass;
  port.run([&] {
    pass = std::make_shared<PassResult>(
        scaler::unscale(std::move(gathered.groups), inv_scale, flag, options_for(*record)));
  });
  auto flags = flags_of(*pass);
  port.set(*record, Stage::kUnscaled, flags);
  port.unscaled_by(pass);
  note_pass(*record, std::move(pass), call);
  if (call.agreement != nullptr) {
    agree_on(flags, call);
    port.set(*record, Stage::kUnscaled, flags);
  }
  return true;
}

const PassResult* ScalerCore::check(OptimizerPort& port, const RecordPointer& record,
                                    const ScalerCall& call, std::optional<double> max_norm) {
  if (port.stage(*record) != Stage::kReady || !port.may_check()) {
    return nullptr;
  }
  const bool may_hold = !max_norm && record->pass != nullptr && record->inv_scale.defined();
  const auto flag = may_hold ? at::Tensor() : port.flag_for_pass(*record, call.scale);
  const auto inv_scale = may_hold ? at::Tensor() : inverse_for(*record, call.scale);
  auto gathered = port.gather(*record, Purpose::kCheck);
  if (gathered.has_foreign || record->shares_gradients || !can_check(gathered.groups) ||
      (max_norm && any_duplicates(gathered.groups))) {
    return nullptr;
  }
  if (record->pass != nullptr) {
    if (may_hold && record->pass->holds(gathered.groups)) {
      return record->pass.get();
    }
    // Its gradients go, which may run code that changes everything read so far.
    record->pass.reset();
    return check(port, record, call, max_norm);
  }
  std::shared_ptr<PassResult> pass;
  port.run([&] {
    pass = std::make_shared<PassResult>(
        scaler::check(std::move(gathered.groups), inv_scale, flag, options_for(*record), max_norm));
  });
  auto flags = flags_of(*pass);
  agree_on(flags, call);
  note_pass(*record, std::move(pass), call);
  record->inv_scale = inv_scale;
  port.set(*record, Stage::kReady, flags);
  return record->pass.get();
}

void ScalerCore::clip_now(OptimizerPort& port, const RecordPointer& record) {
  if (port.stage(*record) == Stage::kReady) {
    port.unscale();  // Applies them too: whoever unscales wants to see the gradients.
  } else {
    apply_clips(port, record);
  }
}

void ScalerCore::apply_clips(OptimizerPort& port, const RecordPointer& record) {
  const at::NoGradGuard no_grad;
  if (const auto coefficient = std::exchange(record->clip_coef, at::Tensor());
      coefficient.defined()) {
    multiply(port, port.gather(*record, Purpose::kMultiply), coefficient);
  }
  if (const auto clip_value = std::exchange(record->clip_value, std::nullopt)) {
    port.clamp(*record, *clip_value);
  }
}

at::Tensor ScalerCore::clip_unscaled(OptimizerPort& port, OptimizerRecord& record,
                                     const NormClip& clip, bool may_put_off,
                                     std::vector<at::Tensor> flags) {
  const at::NoGradGuard no_grad;
  const auto gathered = port.gather(record, Purpose::kNorm);
  if (gathered.groups.empty() && !gathered.has_foreign && !clip.norm_over_ranks) {
    return {};
  }
  const auto norm = clip.norm_over_ranks ? clip.norm_over_ranks()
                                         : norm_of(port, gathered, record, clip.norm_type);
  if (clip.error_if_nonfinite) {
    port.check_finite(norm, clip.norm_type);
  }
  const auto coefficient = clip_coefficient(norm, clip.max_norm);
  for (auto& flag : flags) {
    raise_unless_finite(flag, coefficient);
  }
  // The step would clip a gradient of two parameters twice.
  if (may_put_off && !gathered.has_foreign && !record.shares_gradients) {
    record.clip_coef = coefficient.to(at::kFloat);
  } else {
    multiply(port, gathered, coefficient);
  }
  return norm;
}

at::Tensor ScalerCore::clip_norm(OptimizerPort& port, const ScalerCall& call, const NormClip& clip,
                                 bool may_put_off) {
  const auto record = record_of(port);
  if (port.stage(*record) == Stage::kReady) {
    forget_if_scaled_anew(port, *record, call);
  }
  if (record->clips_at_step()) {
    clip_now(port, record);
  }
  const bool needs_check = may_put_off && clip.norm_type == 2.0 && !clip.norm_over_ranks;
  const auto* const pass = needs_check ? check(port, record, call, clip.max_norm) : nullptr;
  at::Tensor norm;
  if (pass == nullptr) {
    if (port.stage(*record) == Stage::kReady) {
      port.unscale();
    }
    norm = clip_unscaled(port, *record, clip, may_put_off, port.flags(*record));
  } else if (!pass->devices().empty()) {
    norm = pass->total_norm(at::kFloat);
    const auto& coefficient = pass->devices().front().clip_coef;
    if (clip.error_if_nonfinite) {
      port.check_finite(norm, clip.norm_type);
    }
    record->clip_coef = coefficient.defined() ? coefficient : clip_coefficient(norm, clip.max_norm);
  }
  if (clip.norm_type == 2.0) {
    record->norm = norm;
  }
  return norm;
}

void ScalerCore::clip_value(OptimizerPort& port, const ScalerCall& call, double clip_value,
                            bool may_put_off) {
  const auto record = record_of(port);
  if (port.stage(*record) == Stage::kReady) {
    forget_if_scaled_anew(port, *record, call);
  }
  if (record->clip_value) {
    clip_now(port, record);
  }
  record->clip_value = clip_value;
  // The pass, which the step will use, tells whose gradients are to be clipped: others that a later
  // iteration makes, if this one is broken off, are not.
  const bool put_off =
      may_put_off && (port.stage(*record) != Stage::kReady || record->pass != nullptr ||
                      check(port, record, call, std::nullopt) != nullptr);
  if (!put_off) {
    clip_now(port, record);
  }
}

bool ScalerCore::step(OptimizerPort& port, const ScalerCall& call, bool keep_scaled_grads) {
  const auto record = record_of(port);
  const bool fresh = port.stage(*record) == Stage::kReady;
  optim::StepGate gate;
  if (fresh) {
    forget_if_scaled_anew(port, *record, call);
  }
  if (fresh && check(port, record, call, std::nullopt) != nullptr) {
    gate.inv_scale = record->inv_scale;
  } else if (fresh || record->shares_gradients) {
    // Shared gradients are clipped in place: the step does not write them.
    clip_now(port, record);
  }
  const auto flags = port.flags(*record);
  if (flags.empty()) {
    if (fresh) {  // A refused call leaves no trace.
      const auto pass = record->start_iteration();
      port.reset(*record);
    }
    return false;
  }
  gate.found_inf = combine_flags(flags, flags.front().device());
  if (record->clip_coef.defined()) {
    gate.clip_coef = record->clip_coef;
  }
  gate.clip_value = record->clip_value;
  gate.write_grads = !keep_scaled_grads && !record->shares_gradients;
  port.step(gate);
  port.set_stepped(*record);
  if (const auto pass = record->pass) {
    pass->forget();
  }
  return true;
}

std::vector<RecordPointer> ScalerCore::records_in_use() const {
  std::vector<RecordPointer> used;
  for (const auto& [key, record] : *records_) {
    if (record->first_pass != 0) {
      used.push_back(record);
    }
  }
  std::ranges::sort(used, {}, [](const auto& record) { return record->first_pass; });
  return used;
}

std::vector<RecordPointer> ScalerCore::records_counted_last() const {
  std::int64_t last = -1;
  for (const auto& [key, record] : *records_) {
    last = std::max(last, record->ranges.step());
  }
  std::vector<RecordPointer> counted;
  for (const auto& [key, record] : *records_) {
    if (last >= 0 && record->ranges.step() == last) {
      counted.push_back(record);
    }
  }
  std::ranges::sort(counted, {}, [](const auto& record) { return record->ranges.order(); });
  return counted;
}

void ScalerCore::start_iteration() {
  // Gradients and records end when no record is looked at: that may run code of users.
  std::vector<RecordPointer> all;
  all.reserve(records_->size());
  for (const auto& [key, record] : *records_) {
    all.push_back(record);
  }
  std::vector<std::shared_ptr<PassResult>> ended;
  ended.reserve(all.size());
  for (const auto& record : all) {
    ended.push_back(record->start_iteration());
  }
  std::erase_if(*records_, [](const auto& entry) {
    return entry.first < 0 || entry.second->handle->is_gone();
  });
}

void ScalerCore::end_iteration(ScaleTensors& tensors, const ScaleRules& rules,
                               const std::vector<Outcome>& outcomes, const at::Tensor& new_scale,
                               bool capturing) {
  if (outcomes.empty()) {
    const at::NoGradGuard no_grad;
    tensors.scale.copy_(new_scale.reshape({}));
  } else {
    std::vector<at::Tensor> flags;
    for (const auto& outcome : outcomes) {
      flags.insert(flags.end(), outcome.flags.begin(), outcome.flags.end());
    }
    sidecar_.prepare(tensors.scale);
    const auto norm =
        sidecar_.keeps_history() ? total_norm(outcomes, tensors.scale.device()) : at::Tensor();
    sidecar_.update(tensors, rules, flags, norm, new_scale);
  }
  if (capturing) {
    captured_ = outcomes;
  } else {
    note_outcomes(tensors.scale, outcomes);
  }
  start_iteration();
}

void ScalerCore::note_replay(const ScaleTensors& tensors, const std::vector<Outcome>& captured) {
  bump_version(tensors.scale);
  bump_version(tensors.growth_tracker);
  bump_version(tensors.hysteresis_tracker);
  bump_version(tensors.fast_growth_limit);
  sidecar_.note_update(tensors.scale);
  note_outcomes(tensors.scale, captured);
}

void ScalerCore::note_outcomes(const at::Tensor& scale, const std::vector<Outcome>& outcomes) {
  const auto step = log_.iterations();
  const bool has_row = !outcomes.empty() && sidecar_.keeps_history();
  if (has_row) {
    sidecar_.note_row();
  }
  const bool tells_skips = !outcomes.empty() && !skip_hooks_.empty();
  log_.expect(scale, outcomes, tells_skips,
              tells_skips && has_row ? sidecar_.last_row() : at::Tensor());
  if (!has_row) {
    return;
  }
  for (const auto& logger : loggers_) {
    logger->expect(step, sidecar_.last_row(), outcomes);
  }
}

}  // namespace fastamp::scaler
