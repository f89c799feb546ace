// SPDX-License-Identifier: Apache-2.0
#include "core/device_copy.h"
#include "core/tensor_kind.h"
#include "optim/torch_step.h"
#include "scaler/grad_scaler_impl.h"
#include "scaler/scale_checks.h"
#include "scaler/skip_callback.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp {

using scaler::Gathered;
using scaler::OptimizerRecord;
using scaler::Purpose;
using scaler::Stage;
using torch::optim::Optimizer;

namespace {

scaler::ScaleRules rules_of(const GradScalerOptions& options) {
  return {
      .growth_factor = options.growth_factor(),
      .backoff_factor = options.backoff_factor(),
      .growth_interval = options.growth_interval(),
      .hysteresis = options.hysteresis(),
      .min_scale = options.min_scale(),
      .max_scale = options.max_scale(),
      .fast_growth_interval = options.fast_growth_interval().value_or(0),
  };
}

bool usable(const GradScalerOptions& options) {
  if (options.enabled() && options.device() == c10::kCUDA && !torch::cuda::is_available()) {
    TORCH_WARN("GradScaler: expected a CUDA device for device=cuda, found none. Disabling.");
    return false;
  }
  return options.enabled();
}

/// Forgets what was put off to the step for gradients that are gone: the iteration was broken off.
void forget_if_scaled_anew(const Optimizer& optimizer, OptimizerRecord& record,
                           const scaler::ScalerCall& call) {
  if (scaler::is_scaled_anew(optimizer, record, call)) {
    const auto earlier = record.start_iteration();
  }
}

/// Whether clipping may be put off to the step of an optimizer.
bool may_put_off(Optimizer& optimizer, bool fuse) {
  return scaler::supports_amp_step(optimizer, fuse) && !scaler::has_sparse(optimizer);
}

}  // namespace

GradScaler::Impl::Impl(const GradScalerOptions& given)
    : options(given),
      enabled(usable(given)),
      state(given.init_scale(), rules_of(given)),
      core(given.init_scale(), given.history_size()) {
  scaler::check_extras("GradScaler", state.rules(), given.init_scale());
  const auto fast_growth_interval = given.fast_growth_interval().value_or(1);
  TORCH_CHECK_VALUE(fast_growth_interval >= 1,
                    "GradScaler: expected 1 <= fast_growth_interval < 2^31, got ",
                    fast_growth_interval);
  scaler::check_history_size("GradScaler", given.history_size());
  if (enabled) {
    scaler::check_rules("GradScaler", state.rules());
    scaler::check_scale("GradScaler", "init_scale", given.init_scale());
  }
}

void GradScaler::Impl::expect_scale(const char* function) const {
  TORCH_CHECK(state.initialised(), function,
              ": expected scale() to have been called before, got no scale yet. Call "
              "scaler.scale(loss).backward() first.");
}

scaler::ScalerCall GradScaler::Impl::call() const {
  return {.scale = state.scale_tensor(),
          .times_scaled = state.times_scaled(),
          .device = options.device(),
          .agreement = options.agreement() ? &options.agreement() : nullptr,
          .keeps_flag = true};
}

void GradScaler::Impl::begin(const char* function, const Optimizer& optimizer) const {
  expect_scale(function);
  const auto record = scaler::find_record(core, optimizer);
  if (record == nullptr) {
    return;
  }
  const auto stage = record->progress.stage;
  scaler::check_order(function, stage);
  TORCH_CHECK(stage != Stage::kUnscaled || !scaler::is_scaled_anew(optimizer, *record, call()),
              function,
              ": expected the gradients that unscale_() has divided by the scale, got others, and "
              "scale() was called since, so that they are scaled. After an iteration that was "
              "broken off, call update() before the next; to replace unscaled gradients, write "
              "into them.");
}

void GradScaler::Impl::unscale(Optimizer& optimizer, OptimizerRecord& record) {
  forget_if_scaled_anew(optimizer, record, call());
  core.unscale(record, scaler::gather(optimizer, record, Purpose::kUnscale), call());
  record.clips_due = record.clips_at_step();
  scaler::apply_clips(optimizer, record);
}

bool GradScaler::Impl::check(Optimizer& optimizer, OptimizerRecord& record) {
  if (record.progress.stage != Stage::kReady || scaler::has_sparse(optimizer)) {
    return false;
  }
  std::optional<bool> checked;
  while (!checked) {
    checked = core.check(record, scaler::gather(optimizer, record, Purpose::kCheck), call());
  }
  return *checked;
}

void GradScaler::Impl::clip_now(Optimizer& optimizer, OptimizerRecord& record) {
  if (record.progress.stage == Stage::kReady) {
    unscale(optimizer, record);  // Applies them too: whoever unscales wants to see the gradients.
  } else {
    scaler::apply_clips(optimizer, record);
  }
}

void GradScaler::Impl::update(const at::Tensor& new_scale) {
  std::vector<scaler::Outcome> ended;
  for (const auto& record : core.records_in_use()) {
    if (const auto& flags = record->progress.flags; !flags.empty()) {
      ended.push_back({.record = record, .flags = flags, .counts = record->counts()});
    }
  }
  core.end_iteration({.tensors = state.tensors(),
                      .rules = state.rules(),
                      .outcomes = std::move(ended),
                      .new_scale = new_scale,
                      .capturing = capturing});
  notify_of_iteration();
}

void GradScaler::Impl::notify_of_iteration() {
  if (!capturing && core.skip_hooks().waits()) {
    core.log().poll_if_possible(/*wait=*/true);
  }
  report_news();
}

void GradScaler::Impl::poll(bool wait) {
  core.log().poll(wait);
  report_news();
}

void GradScaler::Impl::report_news() {
  warn_if_due();
  core.pass_rows_on();
}

void GradScaler::Impl::warn_if_due() {
  if (const auto what = core.log().take_warning()) {
    TORCH_WARN("GradScaler: ", *what,
               ". Look at overflow_report(model->named_parameters()) for the parameters concerned, "
               "at the loss and the inputs of that step for NaN, and at history() for when it "
               "began; a learning rate that is too high, a division by zero and a log or sqrt of "
               "zero are common causes.");
  }
}

OverflowReport GradScaler::Impl::report(const scaler::ParameterNames& names) const {
  const auto& overflow = core.log().overflow();
  return overflow ? scaler::named_report(*overflow, names) : loaded_report;
}

UnderflowReport GradScaler::Impl::underflows(const scaler::ParameterNames& names) const {
  UnderflowReport report;
  for (const auto& record : core.records_counted_last()) {
    const auto counts = record->ranges.read();
    report.step = record->ranges.step();
    report.scale = counts.scale;
    report.range += counts.range;
    report.elements += counts.elements;
    for (const auto& [index, counted] : counts.zeros) {
      if (counted.zeros != 0) {
        auto& row = report.gradients.emplace_back();
        scaler::describe(row, *record, index, names);
        row.zeros = counted.zeros;
        row.elements = counted.elements;
      }
    }
  }
  return report;
}

at::Tensor GradScaler::Impl::step_on_device(Optimizer& optimizer, OptimizerRecord& record) {
  const bool was_ready = record.progress.stage == Stage::kReady;
  if (was_ready) {
    forget_if_scaled_anew(optimizer, record, call());
  }
  // Shared gradients are clipped in place: the step does not write them.
  if (was_ready ? !check(optimizer, record) : record.shares_gradients) {
    clip_now(optimizer, record);
  }
  const auto amp_step =
      scaler::ScalerCore::begin_step(record, was_ready, options.keep_scaled_grads());
  auto result = scaler::step_with(optimizer, amp_step);
  scaler::ScalerCore::end_step(record);
  return result;
}

std::optional<at::Tensor> GradScaler::Impl::step_if_finite(Optimizer& optimizer,
                                                           OptimizerRecord& record) {
  const bool was_ready = record.progress.stage == Stage::kReady;
  if (was_ready) {
    unscale(optimizer, record);
  } else {
    scaler::apply_clips(optimizer, record);
  }
  const auto amp_step =
      scaler::ScalerCore::begin_step(record, was_ready, /*keep_scaled_grads=*/false);
  std::optional<at::Tensor> result;
  if (!optim::is_skipped(amp_step)) {
    result = scaler::call_step(optimizer);
  }
  scaler::ScalerCore::end_step(record);
  return result;
}

at::Tensor GradScaler::Impl::clip_norm(Optimizer& optimizer, const scaler::NormClip& clip) {
  if (!enabled) {
    OptimizerRecord none;
    return scaler::clip_unscaled(optimizer, none, clip, /*at_step=*/false, nullptr);
  }
  begin("clip_grad_norm_", optimizer);
  const bool at_step = may_put_off(optimizer, options.fuse());
  const auto record = scaler::record_of(core, optimizer);
  if (record->progress.stage == Stage::kReady) {
    forget_if_scaled_anew(optimizer, *record, call());
    if (at_step && clip.norm_type == 2.0) {
      record->pass.reset();
      auto gathered = scaler::gather(optimizer, *record, Purpose::kCheck);
      if (auto norm = core.clip_norm_at_step(*record, std::move(gathered), clip, call())) {
        return *norm;
      }
    }
  }
  if (record->progress.stage == Stage::kReady || record->clips_at_step()) {
    clip_now(optimizer, *record);
  }
  const auto now = call();
  return scaler::clip_unscaled(optimizer, *record, clip, at_step, &now);
}

void GradScaler::Impl::clip_value(Optimizer& optimizer, double clip_value) {
  if (!enabled) {
    OptimizerRecord none;
    scaler::clip_values(optimizer, none, clip_value);
    return;
  }
  using scaler::ClipNext;
  begin("clip_grad_value_", optimizer);
  const bool at_step = may_put_off(optimizer, options.fuse());
  const auto record = scaler::record_of(core, optimizer);
  if (record->progress.stage == Stage::kReady) {
    forget_if_scaled_anew(optimizer, *record, call());
  }
  auto next = ClipNext::kApplyThenRepeat;
  while (next == ClipNext::kApplyThenRepeat) {
    std::optional<Gathered> gathered;
    if (at_step && record->progress.stage == Stage::kReady) {
      gathered = scaler::gather(optimizer, *record, Purpose::kCheck);
    }
    next = core.clip_value(*record, std::move(gathered), clip_value, at_step, call());
    if (next == ClipNext::kNothing) {
      continue;
    }
    try {
      clip_now(optimizer, *record);
    } catch (...) {
      if (next == ClipNext::kApply) {
        record->clip_value.reset();  // A call that failed clips nothing later.
      }
      throw;
    }
  }
}

void GradScaler::Impl::set_rules(const char* function, const scaler::ScaleRules& rules) {
  if (enabled) {
    scaler::check_rules(function, rules);
  }
  state.rules() = rules;
}

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(std::make_unique<Impl>(options)) {
  if (options.on_skip()) {
    register_on_skip(options.on_skip());
  }
}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

void GradScaler::expect_not_moved_from(const char* function) const {
  TORCH_CHECK(impl_ != nullptr, function,
              ": expected a scaler, got one that was moved from. Assign another one to it, or call "
              "the one that it was moved to.");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  expect_not_moved_from("scale");
  return impl_->enabled ? impl_->state.scaled(outputs) : outputs;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  expect_not_moved_from("scale");
  return impl_->enabled ? impl_->state.scaled(outputs) : outputs;
}

at::Tensor GradScaler::unscale(const at::Tensor& tensor) const {
  return unscale(std::vector<at::Tensor>{tensor}).front();
}

std::vector<at::Tensor> GradScaler::unscale(const std::vector<at::Tensor>& tensors) const {
  expect_not_moved_from("unscale");
  if (!impl_->enabled) {
    return tensors;
  }
  impl_->expect_scale("unscale");
  const auto inverse = impl_->core.scale_history().inv_scale(impl_->state.scale_tensor());
  std::vector<at::Tensor> unscaled;
  unscaled.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.defined() && at::isFloatingType(tensor.scalar_type()),
                      "unscale: expected tensors of a floating dtype, got ",
                      tensor.defined() ? c10::toString(tensor.scalar_type()) : "an undefined one");
    const auto wide = tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
    unscaled.push_back(wide * on_device(inverse, wide.device(), wide.scalar_type()));
  }
  return unscaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  expect_not_moved_from("unscale_");
  if (impl_->enabled) {
    impl_->expect_scale("unscale_");
    const auto record = scaler::record_of(impl_->core, optimizer);
    if (record->clips_due) {
      scaler::apply_clips(optimizer, *record);
      return;
    }
    scaler::check_order("unscale_", record->progress.stage);
    impl_->unscale(optimizer, *record);
  }
}

at::Tensor GradScaler::pass_(torch::optim::Optimizer& optimizer,
                             const torch::optim::Optimizer::LossClosure& closure) {
  expect_not_moved_from("pass_");
  TORCH_CHECK_VALUE(closure, "pass_: expected a closure, got an empty function");
  if (!impl_->enabled) {
    return closure();
  }
  const auto record = scaler::record_of(impl_->core, optimizer);
  scaler::check_order("pass_", record->progress.stage);
  const auto times_scaled = impl_->state.times_scaled();
  auto loss = closure();
  TORCH_CHECK(impl_->state.times_scaled() != times_scaled,
              "pass_: expected a closure that gives its loss to scale(), got one that does not");
  scaler::check_order("pass_", record->progress.stage);
  impl_->unscale(optimizer, *record);
  if (record->progress.flags.empty()) {
    record->progress = {.stage = Stage::kReady, .flags = record->earlier_flags};
    TORCH_CHECK(false, "pass_: expected an optimizer with at least one gradient, got none");
  }
  scaler::ScalerCore::end_pass(*record, scaler::gather(optimizer, *record, Purpose::kMultiply));
  return loss;
}

std::optional<at::Tensor> GradScaler::step(torch::optim::Optimizer& optimizer,
                                           const torch::optim::Optimizer::LossClosure& closure) {
  expect_not_moved_from("step");
  if (!impl_->enabled) {
    return scaler::call_step(optimizer, closure);
  }
  TORCH_CHECK(!closure,
              "step: expected no closure while the scaler is enabled, got one. Closure use "
              "is not currently supported if GradScaler is enabled.");
  impl_->begin("step", optimizer);
  const bool on_device = scaler::supports_amp_step(optimizer, impl_->options.fuse());
  const auto record = scaler::record_of(impl_->core, optimizer);
  return on_device ? impl_->step_on_device(optimizer, *record)
                   : impl_->step_if_finite(optimizer, *record);
}

at::Tensor GradScaler::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                       double norm_type, bool error_if_nonfinite) {
  expect_not_moved_from("clip_grad_norm_");
  const auto norm = impl_->clip_norm(
      optimizer,
      {.max_norm = max_norm, .norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite});
  return norm.defined() ? norm : at::zeros({});
}

void GradScaler::clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  expect_not_moved_from("clip_grad_value_");
  TORCH_CHECK_VALUE(clip_value >= 0.0, "clip_grad_value_: expected clip_value >= 0, got ",
                    clip_value);
  impl_->clip_value(optimizer, clip_value);
}

void GradScaler::update() {
  expect_not_moved_from("update");
  if (impl_->enabled) {
    impl_->expect_scale("update");
    impl_->update();
  }
}

void GradScaler::update(double new_scale) {
  expect_not_moved_from("update");
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("update");
  scaler::check_scale("update", "new_scale", new_scale);
  scaler::check_within_bounds("update", "new_scale", impl_->state.rules(), new_scale);
  impl_->update(at::scalar_tensor(new_scale, at::kFloat));
}

void GradScaler::update(const at::Tensor& new_scale) {
  expect_not_moved_from("update");
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("update");
  scaler::check_new_scale(new_scale, impl_->options.device());
  impl_->update(new_scale.reshape({}));
}

double GradScaler::get_scale() const {
  expect_not_moved_from("get_scale");
  return impl_->enabled ? impl_->state.scale() : 1.0;
}

double GradScaler::get_scale_async() {
  expect_not_moved_from("get_scale_async");
  impl_->poll(/*wait=*/false);
  return impl_->enabled ? impl_->core.log().scale() : 1.0;
}

bool GradScaler::step_was_skipped() {
  expect_not_moved_from("step_was_skipped");
  impl_->poll(/*wait=*/true);
  return impl_->core.log().skipped();
}

bool GradScaler::step_was_skipped_for(const torch::optim::Optimizer& optimizer) {
  expect_not_moved_from("step_was_skipped_for");
  impl_->poll(/*wait=*/true);
  const auto record = scaler::find_record(impl_->core, optimizer);
  return record != nullptr && record->skipped;
}

OverflowReport GradScaler::overflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  expect_not_moved_from("overflow_report");
  impl_->poll(/*wait=*/true);
  return impl_->report(scaler::names_by_identity(named_parameters));
}

UnderflowReport GradScaler::underflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  expect_not_moved_from("underflow_report");
  return impl_->underflows(scaler::names_by_identity(named_parameters));
}

std::vector<StepRecord> GradScaler::history() const {
  expect_not_moved_from("history");
  return impl_->core.scale_history().history();
}

double GradScaler::get_growth_factor() const {
  expect_not_moved_from("get_growth_factor");
  return impl_->state.rules().growth_factor;
}

double GradScaler::get_backoff_factor() const {
  expect_not_moved_from("get_backoff_factor");
  return impl_->state.rules().backoff_factor;
}

int64_t GradScaler::get_growth_interval() const {
  expect_not_moved_from("get_growth_interval");
  return impl_->state.rules().growth_interval;
}

void GradScaler::set_growth_factor(double growth_factor) {
  expect_not_moved_from("set_growth_factor");
  auto rules = impl_->state.rules();
  rules.growth_factor = growth_factor;
  impl_->set_rules("set_growth_factor", rules);
}

void GradScaler::set_backoff_factor(double backoff_factor) {
  expect_not_moved_from("set_backoff_factor");
  auto rules = impl_->state.rules();
  rules.backoff_factor = backoff_factor;
  impl_->set_rules("set_backoff_factor", rules);
}

void GradScaler::set_growth_interval(int64_t growth_interval) {
  expect_not_moved_from("set_growth_interval");
  auto rules = impl_->state.rules();
  rules.growth_interval = growth_interval;
  impl_->set_rules("set_growth_interval", rules);
}

bool GradScaler::is_enabled() const {
  expect_not_moved_from("is_enabled");
  return impl_->enabled;
}

void SkipHandle::remove() {
  if (const auto hook = hook_.lock()) {
    // Its end may run code of users, and that may come back here.
    const auto callback = std::exchange(hook->callback, nullptr);
  }
}

SkipHandle GradScaler::register_on_skip(SkipCallback callback, bool wait) {
  expect_not_moved_from("register_on_skip");
  return SkipHandle(impl_->core.skip_hooks().add(scaler::skip_hook(std::move(callback), wait)));
}

}  // namespace fastamp
