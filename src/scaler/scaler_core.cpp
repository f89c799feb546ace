// SPDX-License-Identifier: Apache-2.0
#include "scaler/scaler_core.h"

#include "core/device_copy.h"
#include "core/tensor_version.h"
#include "scaler/clip_norms.h"
#include "scaler/gradient_factors.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace fastamp::scaler {
namespace {

at::Tensor flag_for_pass(OptimizerRecord& record, const ScalerCall& call) {
  if (call.spare_flag.defined()) {
    return call.spare_flag;
  }
  return call.keeps_flag ? record.buffers.flag_beside(call.scale) : flag_without_value(call.scale);
}

/// @param flags  With room for them.
std::vector<at::Tensor> flags_of(const PassResult& pass, std::vector<at::Tensor> flags) {
  for (const auto& device : pass.devices()) {
    flags.push_back(device.found_inf);
  }
  return flags;
}

std::vector<at::Tensor> room_for_flags(const std::vector<DeviceGradients>& groups) {
  std::vector<at::Tensor> flags;
  flags.reserve(groups.size());
  return flags;
}

bool any_duplicates(const std::vector<DeviceGradients>& groups) {
  return std::ranges::any_of(groups, &DeviceGradients::any_duplicates);
}

/// The norm over all optimizers of an iteration, fp32; undefined if one's is not known.
at::Tensor total_norm(const std::vector<Outcome>& outcomes, c10::Device home) {
  std::vector<at::Tensor> norms;
  for (const auto& outcome : outcomes) {
    auto& record = *outcome.record;
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

/// Refuses a norm that is inf or NaN, on all ranks if it is so on one: else they go different ways.
/// sync: waits for the device.
void refuse_non_finite(const at::Tensor& norm, double norm_type, const ScalerCall* call) {
  if (call != nullptr && call->agreement != nullptr && *call->agreement) {
    auto flag = new_flag(call->scale);
    if (norm.defined()) {
      raise_unless_finite(flag, on_device(norm, flag.device(), at::kFloat));
    }
    std::vector<at::Tensor> flags{flag};
    agree_on(flags, *call);
    const bool is_finite = !norm.defined() || std::isfinite(norm.item<double>());
    TORCH_CHECK(!is_finite || flag.item<float>() == 0.0F,
                "clip_grad_norm_: expected finite gradients on all ranks, got a norm on another "
                "rank that is inf or NaN. All refuse it, as `error_if_nonfinite` asks for.");
  }
  if (norm.defined()) {
    check_finite(norm, norm_type);
  }
}

/// Raises flags for a reason that a rank's own gradients are not. Their counters, which are written
/// at such an overflow only, must not show an earlier one then.
template <typename Raise>
void raise_for_others(OptimizerRecord& record, const Raise& raise) {
  const at::NoGradGuard no_grad;
  auto& flags = record.progress.flags;
  std::vector<at::Tensor> own;
  own.reserve(flags.size());
  for (const auto& flag : flags) {
    own.push_back(flag.ne(0));
  }
  raise(flags);
  if (own.empty()) {
    return;
  }
  auto others = flags.front().ne(0);
  for (const auto& mine : own) {
    others = others.logical_and(on_device(mine, others.device(), at::kBool).logical_not());
  }
  for (const auto& counted : record.counts()) {
    counted->counts.masked_fill_(on_device(others, counted->device, at::kBool), 0);
  }
}

/// agree_on() for the flags of a record's pass.
void agree_on_pass(OptimizerRecord& record, const ScalerCall& call) {
  if (call.agreement != nullptr && *call.agreement) {
    raise_for_others(record, [&](auto& flags) { agree_on(flags, call); });
  }
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

NoGradients::NoGradients(std::string what)
    : c10::Error({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, std::move(what)) {}

void check_order(std::string_view function, Stage stage) {
  if (function == "unscale_") {
    TORCH_CHECK(stage != Stage::kUnscaled,
                "unscale_: expected one call per optimizer and iteration, got a second one: "
                "unscale_() has already been called on this optimizer since the last update().");
    TORCH_CHECK(stage != Stage::kStepped,
                "unscale_: expected a call before step(), got one after it: unscale_() is being "
                "called after step().");
  } else if (function == "pass_") {
    TORCH_CHECK(stage == Stage::kReady,
                "pass_: expected an optimizer that was neither unscaled nor stepped since the last "
                "update(), got one after ",
                stage == Stage::kUnscaled ? "unscale_()." : "step().");
  } else if (function == "step") {
    TORCH_CHECK(stage != Stage::kStepped,
                "step: expected one call per optimizer and iteration, got a second one: step() has "
                "already been called since the last update().");
  } else {
    TORCH_CHECK(stage != Stage::kStepped, function,
                ": expected a call before step(), got one after it: ", function,
                "() is being called after step().");
  }
}

void refuse_no_gradients() {
  throw NoGradients(
      "step: expected an optimizer with at least one gradient, got none: No inf checks were "
      "recorded for this optimizer.");
}

ScalerCore::ScalerCore(double init_scale, std::int64_t history_size)
    : records_(std::make_shared<Records>()), scale_history_(history_size), log_(init_scale) {}

ScalerCore::ScalerCore(double init_scale, const ScalerCore& other)
    : records_(other.records_), scale_history_(0), log_(init_scale) {}

void ScalerCore::load(double scale, std::vector<StepRecord> history,
                      std::int64_t skipped_in_a_row) {
  const auto iterations = history.empty() ? 0 : history.back().step + 1;
  scale_history_.load_history(std::move(history));
  // The end of what was logged may run code of users: the new log is in its place by then.
  const auto before = std::exchange(log_, IterationLog(scale, iterations, skipped_in_a_row));
}

void ScalerCore::log_to(std::shared_ptr<StepLogger> logger) {
  TORCH_CHECK_VALUE(scale_history_.history_size() > 0,
                    "log_to: expected a scaler with history_size above 0, got 0");
  loggers_.push_back(std::move(logger));
}

void ScalerCore::pass_rows_on() {
  const auto loggers = loggers_;  // A callback may log to others, too.
  for (const auto& logger : loggers) {
    logger->pass_on(/*wait=*/false);
  }
  std::erase_if(loggers_, [](const auto& logger) { return logger->is_released(); });
  skip_hooks_.notify(log_.take_skips());
}

RecordPointer ScalerCore::find(std::intptr_t key) const {
  const auto found = records_->find(key);
  return found == records_->end() ? nullptr : found->second;
}

RecordPointer ScalerCore::add(std::intptr_t key, std::unique_ptr<OptimizerHandle> handle) {
  auto record = std::make_shared<OptimizerRecord>();
  record->handle = std::move(handle);
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

bool ScalerCore::may_be_scaled_anew(const OptimizerRecord& record, std::uint64_t times_scaled) {
  return record.pass != nullptr && !record.has_foreign && record.times_scaled != times_scaled;
}

at::Tensor ScalerCore::inverse_for(OptimizerRecord& record, const at::Tensor& scale,
                                   Gathered& gathered) const {
  if (!is_plain_cpu_scalar(scale, at::kFloat)) {
    for (auto& group : gathered.groups) {
      group.arrays.clear();  // Operators on the scale may run code that moves gradients.
    }
  }
  auto kept = scale_history_.kept_inverse(scale);
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
  const at::NoGradGuard no_grad;
  for (const auto& flag : record.earlier_flags) {
    for (const auto& device : record.pass->devices()) {
      const auto& own = device.found_inf;
      own.copy_(at::maximum(own, on_device(flag, own.device(), at::kFloat)));
    }
  }
}

void ScalerCore::end_pass(OptimizerRecord& record, const Gathered& gathered) {
  const auto& flags = record.progress.flags;
  zero_if_(gathered.groups, combine_flags(flags, flags.front().device()));
  record.earlier_counts = record.counts();
  record.earlier_flags = flags;  // The flags of earlier ones are in them.
  record.progress.stage = Stage::kReady;
  record.norm = at::Tensor();
  const auto ended = std::exchange(record.pass, nullptr);  // Its end may run code.
}

void ScalerCore::unscale(OptimizerRecord& record, Gathered gathered, const ScalerCall& call) {
  TORCH_INTERNAL_ASSERT(!gathered.has_foreign());
  const auto earlier = record.pass;  // Its end may run code.
  const auto inv_scale = inverse_for(record, call.scale, gathered);
  // What notes the pass is made before it: nothing can be missing once gradients are divided.
  auto pass = std::make_shared<PassResult>();
  auto flags = room_for_flags(gathered.groups);
  *pass = scaler::unscale(std::move(gathered.groups), inv_scale, flag_for_pass(record, call),
                          options_for(record));
  record.shares_gradients = gathered.shared;
  record.progress = {.stage = Stage::kUnscaled, .flags = flags_of(*pass, std::move(flags))};
  note_pass(record, std::move(pass), call);
  agree_on_pass(record, call);
}

std::optional<bool> ScalerCore::check(OptimizerRecord& record, Gathered gathered,
                                      const ScalerCall& call, std::optional<double> max_norm) {
  record.shares_gradients = gathered.shared;
  if (gathered.has_foreign() || gathered.shared || !can_check(gathered.groups) ||
      (max_norm && any_duplicates(gathered.groups))) {
    return false;
  }
  if (record.pass != nullptr) {
    if (!max_norm && record.inv_scale.defined() && record.pass->lists(gathered.groups)) {
      return true;
    }
    gathered = {};
    record.pass.reset();
    return std::nullopt;
  }
  const auto inv_scale = inverse_for(record, call.scale, gathered);
  auto pass = std::make_shared<PassResult>(scaler::check(std::move(gathered.groups), inv_scale,
                                                         flag_for_pass(record, call),
                                                         options_for(record), max_norm));
  record.progress = {.stage = Stage::kReady, .flags = flags_of(*pass, {})};
  note_pass(record, std::move(pass), call);
  record.inv_scale = inv_scale;
  try {
    agree_on_pass(record, call);
  } catch (...) {
    record.progress = {.stage = Stage::kReady, .flags = record.earlier_flags};
    record.inv_scale = at::Tensor();
    const auto unfinished = std::exchange(record.pass, nullptr);  // Or it would count as checked.
    throw;
  }
  return true;
}

std::optional<at::Tensor> ScalerCore::clip_norm_at_step(OptimizerRecord& record, Gathered gathered,
                                                        const NormClip& clip,
                                                        const ScalerCall& call) {
  if (record.clips_at_step() ||
      !check(record, std::move(gathered), call, clip.max_norm).value_or(false)) {
    return std::nullopt;
  }
  const auto& pass = *record.pass;
  record.norm = at::Tensor();
  const bool any = !pass.devices().empty();
  const auto norm = any ? pass.total_norm(at::kFloat) : at::Tensor();
  if (clip.error_if_nonfinite) {
    refuse_non_finite(norm, clip.norm_type, &call);
  }
  if (any) {
    const auto& coefficient = pass.devices().front().clip_coef;
    record.clip_coef = coefficient.defined() ? coefficient : clip_coefficient(norm, clip.max_norm);
    record.norm = norm;
  }
  return record.norm;
}

at::Tensor ScalerCore::two_norm(const OptimizerRecord& record, const Gathered& gathered,
                                at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const auto& groups = gathered.groups;
  if (gathered.has_foreign() || groups.empty()) {
    return {};
  }
  const auto& pass = record.pass;
  if (pass != nullptr && pass->has_norm() && pass->holds(groups)) {
    return pass->total_norm(dtype);
  }
  if (!can_check(groups)) {
    return {};
  }
  const auto one = at::ones({}, at::TensorOptions(at::kFloat).device(groups.front().device));
  return scaler::check(groups, one, flag_without_value(one), {.flag = FlagUse::kOverwrite})
      .total_norm(dtype);
}

void ScalerCore::clip_norm(OptimizerRecord& record, const Gathered& gathered,
                           const at::Tensor& norm, const NormClip& clip, bool at_step,
                           const ScalerCall* call) {
  const at::NoGradGuard no_grad;
  if (clip.error_if_nonfinite) {
    refuse_non_finite(norm, clip.norm_type, call);
  }
  if (!norm.defined()) {
    return;
  }
  const auto coefficient = clip_coefficient(norm, clip.max_norm);
  for (auto& flag : record.progress.flags) {
    raise_unless_finite(flag, coefficient);
  }
  // The step would clip a gradient of two parameters twice.
  if (at_step && !gathered.has_foreign() && !gathered.shared) {
    record.clip_coef = coefficient.to(at::kFloat);
  } else {
    multiply(gathered, coefficient);
  }
  if (clip.norm_type == 2.0) {
    record.norm = norm;
  }
}

ClipNext ScalerCore::clip_value(OptimizerRecord& record, std::optional<Gathered> gathered,
                                double clip_value, bool at_step, const ScalerCall& call) {
  if (record.clip_value) {
    return ClipNext::kApplyThenRepeat;
  }
  // The pass, which the step will use, says whose gradients are to be clipped: others that a later
  // iteration makes, if this one is broken off, are not.
  const bool put_off =
      at_step && (record.progress.stage != Stage::kReady || record.pass != nullptr ||
                  (gathered && check(record, *std::move(gathered), call) == true));
  record.clip_value = clip_value;
  return put_off ? ClipNext::kNothing : ClipNext::kApply;
}

void ScalerCore::multiply(const Gathered& gathered, const at::Tensor& factor) {
  multiply_(gathered.groups, factor);
  if (gathered.has_foreign()) {
    gathered.multiply_foreign(factor);
  }
}

optim::AmpStep ScalerCore::begin_step(OptimizerRecord& record, bool was_ready,
                                      bool keep_scaled_grads) {
  const auto& flags = record.progress.flags;
  if (flags.empty()) {
    if (was_ready) {  // A refused call leaves no trace.
      const auto pass = record.start_iteration();
    }
    refuse_no_gradients();
  }
  optim::AmpStep amp_step;
  if (record.inv_scale.defined()) {
    amp_step.inv_scale = record.inv_scale;
  }
  amp_step.found_inf = combine_flags(flags, flags.front().device());
  if (record.clip_coef.defined()) {
    amp_step.clip_coef = record.clip_coef;
  }
  amp_step.clip_value = record.clip_value;
  amp_step.write_grads = !keep_scaled_grads && !record.shares_gradients;
  return amp_step;
}

optim::AmpStep ScalerCore::begin_unscaled_step(OptimizerRecord& record, const SkipReasons& reasons,
                                               const ScalerCall& call) {
  if (record.progress.flags.empty() && !reasons.not_finite.empty()) {
    record.progress.flags.push_back(new_flag(call.scale));
  }
  const auto norm = reasons.norm.defined() ? reasons.norm : record.known_norm();
  const bool judges = reasons.spike != nullptr && norm.defined();
  if (!reasons.not_finite.empty() || judges || call.agreement != nullptr) {
    raise_for_others(record, [&](auto& flags) {
      for (auto& flag : flags) {
        for (const auto& value : reasons.not_finite) {
          raise_unless_finite(flag, value);
        }
      }
      if (judges) {
        reasons.spike->judge(norm, flags);
      }
      agree_on(flags, call);
    });
  }
  if (record.progress.flags.empty()) {
    return {};
  }
  record.inv_scale = at::Tensor();  // It is 1.
  return begin_step(record, /*was_ready=*/false, /*keep_scaled_grads=*/!record.clips_at_step());
}

void ScalerCore::end_step(OptimizerRecord& record) noexcept {
  record.progress.stage = Stage::kStepped;
  if (const auto pass = record.pass) {
    pass->forget();
  }
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

ScalerCore::Passed ScalerCore::prepare_passed() const {
  Passed passed;
  passed.records.reserve(records_->size());
  passed.passes.reserve(records_->size());
  for (const auto& [key, record] : *records_) {
    passed.records.push_back(record);
  }
  return passed;
}

// Gradients and records end with `passed`, when no record is looked at: that may run code of users.
void ScalerCore::start_iteration(Passed passed) {
  for (const auto& record : passed.records) {
    passed.passes.push_back(record->start_iteration());
  }
  std::erase_if(*records_, [](const auto& entry) {
    return entry.first < 0 || entry.second->handle->is_gone();
  });
}

ScalerCore::PreparedEnd ScalerCore::prepare_end(IterationEnd end) {
  auto& [tensors, rules, outcomes, new_scale, capturing] = end;
  if (outcomes.empty() && !new_scale.defined()) {
    throw NoGradients(
        "update: expected unscale_() or step() on an optimizer with gradients before it, got "
        "neither: No inf checks were recorded prior to update.");
  }
  PreparedEnd prepared;
  prepared.has_outcomes_ = !outcomes.empty();
  if (prepared.has_outcomes_) {
    for (const auto& outcome : outcomes) {
      prepared.flags_.insert(prepared.flags_.end(), outcome.flags.begin(), outcome.flags.end());
    }
    scale_history_.prepare(tensors.scale);
    if (scale_history_.keeps_history()) {
      prepared.norm_ = total_norm(outcomes, tensors.scale.device());
    }
  }
  if (!capturing) {
    prepared.to_note_ = prepare_outcomes(tensors.scale, std::exchange(outcomes, {}));
  }
  prepared.passed_ = prepare_passed();
  prepared.end_ = std::move(end);
  return prepared;
}

std::optional<ScalerCore::PreparedEnd> ScalerCore::prepare_unscaled_end(const ScaleTensors& one,
                                                                        RecordPointer record,
                                                                        bool capturing) {
  if (record->progress.flags.empty()) {
    return std::nullopt;
  }
  ScaleRules rules;
  rules.growth_factor = rules.backoff_factor = 1.0;
  rules.growth_interval = std::numeric_limits<std::int32_t>::max();
  std::vector<Outcome> outcomes;
  auto flags = record->progress.flags;
  auto counts = record->counts();
  outcomes.push_back({.record = std::move(record), .flags = std::move(flags), .counts = counts});
  return prepare_end({.tensors = one,
                      .rules = rules,
                      .outcomes = std::move(outcomes),
                      .new_scale = {},
                      .capturing = capturing});
}

void ScalerCore::end_iteration(IterationEnd end) { end_iteration(prepare_end(std::move(end))); }

void ScalerCore::end_iteration(PreparedEnd prepared) {
  auto& [tensors, rules, outcomes, new_scale, capturing] = prepared.end_;
  if (!prepared.has_outcomes_) {
    const at::NoGradGuard no_grad;
    tensors.scale.copy_(new_scale.reshape({}));
  } else {
    scale_history_.update(tensors, rules, prepared.flags_, prepared.norm_, new_scale);
  }
  if (capturing) {
    captured_ = std::move(outcomes);
  } else {
    note_outcomes(std::move(prepared.to_note_));
  }
  start_iteration(std::move(prepared.passed_));
}

void ScalerCore::note_replay(const ScaleTensors& tensors, const std::vector<Outcome>& captured) {
  bump_version(tensors.scale);
  bump_version(tensors.growth_tracker);
  bump_version(tensors.hysteresis_tracker);
  bump_version(tensors.fast_growth_limit);
  scale_history_.note_update(tensors.scale);
  note_outcomes(prepare_outcomes(tensors.scale, captured));
}

ScalerCore::PreparedOutcomes ScalerCore::prepare_outcomes(const at::Tensor& scale,
                                                          std::vector<Outcome> outcomes) const {
  const bool notifies = !outcomes.empty() && !skip_hooks_.empty();
  // A view of the ring takes as long as the pass over a small gradient.
  const bool has_readers = notifies || !loggers_.empty();
  const bool has_row = has_readers && !outcomes.empty() && scale_history_.keeps_history();
  const auto row = has_row ? scale_history_.next_row() : at::Tensor();
  PreparedOutcomes prepared{.iteration = IterationLog::prepare(scale, std::move(outcomes), notifies,
                                                               notifies ? row : at::Tensor()),
                            .rows = {}};
  if (has_row) {
    prepared.rows.reserve(loggers_.size());
    for (const auto& logger : loggers_) {
      prepared.rows.push_back(
          logger->is_released()
              ? StepLogger::Rows()
              : StepLogger::prepare(log_.iterations(), row, prepared.iteration.front().outcomes));
    }
  }
  return prepared;
}

void ScalerCore::note_outcomes(PreparedOutcomes prepared) {
  const auto& outcomes = prepared.iteration.front().outcomes;
  if (!outcomes.empty() && scale_history_.keeps_history()) {
    scale_history_.note_row();
  }
  log_.expect(std::move(prepared.iteration));
  for (std::size_t i = 0; i < prepared.rows.size(); ++i) {
    loggers_[i]->expect(std::move(prepared.rows[i]));
  }
  log_.poll_if_possible(/*wait=*/false);
}

}  // namespace fastamp::scaler
