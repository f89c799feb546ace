// SPDX-License-Identifier: Apache-2.0
#include "scaler/call_step.h"
#include "scaler/grad_scaler_impl.h"
#include "scaler/option_checks.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

namespace fastamp {

using scaler::LibTorchOptimizer;
using scaler::Stage;

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

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  expect_not_moved_from("unscale_");
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("unscale_");
  const auto call = impl_->call();
  LibTorchOptimizer port(optimizer, &impl_->core, &call);
  const auto stage = impl_->stage_of(port);
  TORCH_CHECK(
      stage != Stage::kUnscaled,
      "unscale_: expected one call per optimizer and iteration, got a second one; unscale_() "
      "has already been called on this optimizer since the last update().");
  TORCH_CHECK(
      stage != Stage::kStepped,
      "unscale_: expected a call before step(), got one after it; unscale_() is being called "
      "after step().");
  port.unscale();
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
  impl_->expect_scale("step");
  const auto call = impl_->call();
  LibTorchOptimizer port(optimizer, &impl_->core, &call);
  TORCH_CHECK(impl_->stage_of(port) != Stage::kStepped,
              "step: expected one call per optimizer and iteration, got a second one; step() has "
              "already been called since the last update().");
  impl_->check_iteration("step", port, call);
  if (!port.takes_gate(impl_->options.fuse())) {
    return impl_->step_if_finite(optimizer, port, call);
  }
  TORCH_CHECK(impl_->core.step(port, call, impl_->options.keep_scaled_grads()), kNoGradients);
  return port.take_result();
}

at::Tensor GradScaler::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                       double norm_type, bool error_if_nonfinite) {
  expect_not_moved_from("clip_grad_norm_");
  const scaler::ScalerCore::NormClip clip{
      .max_norm = max_norm, .norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite};
  at::Tensor norm;
  const auto call = impl_->call();
  LibTorchOptimizer port(optimizer, &impl_->core, &call);
  if (impl_->enabled) {
    impl_->begin_clipping("clip_grad_norm_", port, call);
    norm = impl_->core.clip_norm(port, call, clip, impl_->may_put_off(port));
  } else {
    scaler::OptimizerRecord unused;
    norm = scaler::ScalerCore::clip_unscaled(port, unused, clip, /*may_put_off=*/false, {});
  }
  return norm.defined() ? norm : at::zeros({});
}

void GradScaler::clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  expect_not_moved_from("clip_grad_value_");
  TORCH_CHECK_VALUE(clip_value >= 0.0, "clip_grad_value_: expected clip_value >= 0, got ",
                    clip_value);
  const auto call = impl_->call();
  LibTorchOptimizer port(optimizer, &impl_->core, &call);
  if (!impl_->enabled) {
    scaler::OptimizerRecord unused;
    port.clamp(unused, clip_value);
    return;
  }
  impl_->begin_clipping("clip_grad_value_", port, call);
  impl_->core.clip_value(port, call, clip_value, impl_->may_put_off(port));
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
  impl_->settle(/*wait=*/false);
  return impl_->enabled ? impl_->core.log().scale() : 1.0;
}

bool GradScaler::step_was_skipped() {
  expect_not_moved_from("step_was_skipped");
  impl_->settle(/*wait=*/true);
  return impl_->core.log().skipped();
}

bool GradScaler::step_was_skipped_for(const torch::optim::Optimizer& optimizer) {
  expect_not_moved_from("step_was_skipped_for");
  impl_->settle(/*wait=*/true);
  // A port only looks here.
  const LibTorchOptimizer port(const_cast<torch::optim::Optimizer&>(optimizer));
  const auto record = impl_->core.find(port);
  return record != nullptr && record->skipped;
}

OverflowReport GradScaler::overflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  expect_not_moved_from("overflow_report");
  impl_->settle(/*wait=*/true);
  return impl_->report(names_by_identity(named_parameters));
}

UnderflowReport GradScaler::underflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  expect_not_moved_from("underflow_report");
  return impl_->enabled ? impl_->underflows(names_by_identity(named_parameters))
                        : UnderflowReport();
}

std::vector<StepRecord> GradScaler::history() const {
  expect_not_moved_from("history");
  return impl_->core.sidecar().history();
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

std::optional<GradScalerState> GradScaler::state() const {
  expect_not_moved_from("state");
  if (!impl_->enabled) {
    return std::nullopt;
  }
  const auto& state = impl_->state;
  GradScalerState result;
  result.scale = state.scale();
  result.growth_factor = state.rules().growth_factor;
  result.backoff_factor = state.rules().backoff_factor;
  result.growth_interval = state.rules().growth_interval;
  result.growth_tracker = state.growth_tracker();
  result.min_scale = state.rules().min_scale;
  result.max_scale = state.rules().max_scale;
  if (state.rules().hysteresis > 1) {
    result.hysteresis = state.rules().hysteresis;
    result.hysteresis_tracker = state.hysteresis_tracker();
  }
  if (state.rules().fast_growth_interval > 0) {
    result.fast_growth_interval = state.rules().fast_growth_interval;
    result.fast_growth_limit = state.fast_growth_limit();
  }
  impl_->settle(/*wait=*/true);
  result.history = impl_->core.sidecar().history();
  result.overflow_report = impl_->report({});
  result.skipped_in_a_row = impl_->core.log().skipped_in_a_row();
  return result;
}

void GradScaler::load_state(const std::optional<GradScalerState>& state) {
  expect_not_moved_from("load_state");
  if (!impl_->enabled) {
    return;
  }
  TORCH_CHECK(
      state.has_value(),
      "load_state: expected the state of an enabled scaler, got an empty one, as a disabled "
      "scaler returns it.");
  auto rules = impl_->state.rules();
  rules.growth_factor = state->growth_factor;
  rules.backoff_factor = state->backoff_factor;
  rules.growth_interval = state->growth_interval;
  rules.min_scale = state->min_scale ? state->min_scale : rules.min_scale;
  rules.max_scale = state->max_scale ? state->max_scale : rules.max_scale;
  rules.hysteresis = state->hysteresis.value_or(rules.hysteresis);
  rules.fast_growth_interval = state->fast_growth_interval.value_or(rules.fast_growth_interval);
  scaler::check_rules("load_state", rules);
  scaler::check_extras("load_state", rules, std::nullopt);
  scaler::check_counts("load_state", *state);
  scaler::check_notes("load_state", *state);
  impl_->state.rules() = rules;
  impl_->state.load(state->scale, state->growth_tracker,
                    state->hysteresis_tracker.value_or(rules.hysteresis),
                    state->fast_growth_limit.value_or(std::numeric_limits<double>::infinity()));
  impl_->core.load(state->scale, state->history, state->skipped_in_a_row);
  impl_->loaded_report = state->overflow_report;
}

}  // namespace fastamp
