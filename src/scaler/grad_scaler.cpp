#include "scaler/grad_scaler_impl.h"
#include "scaler/option_checks.h"

#include <ATen/ops/hypot.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace fastamp {
namespace {

scaler::ScaleRules rules_of(const GradScalerOptions& options) {
  return {
      .growth_factor = options.growth_factor(),
      .backoff_factor = options.backoff_factor(),
      .growth_interval = options.growth_interval(),
      .hysteresis = options.hysteresis(),
      .min_scale = options.min_scale(),
      .max_scale = options.max_scale(),
  };
}

bool usable(const GradScalerOptions& options) {
  if (options.enabled() && options.device() == c10::kCUDA && !torch::cuda::is_available()) {
    TORCH_WARN("GradScaler: expected a CUDA device for device=cuda, found none. Disabling.");
    return false;
  }
  return options.enabled();
}

}  // namespace

GradScaler::Impl::Impl(const GradScalerOptions& given)
    : options(given),
      enabled(usable(given)),
      state(given.init_scale(), rules_of(given), given.history_size()),
      notes(given.init_scale()) {
  scaler::check_extras("GradScaler", state.rules(), given.init_scale());
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

at::Tensor GradScaler::Impl::iteration_norm() const {
  at::Tensor total;
  for (const auto& record : records_in_use()) {
    if (!record->pass || record->pass->devices().empty()) {
      continue;
    }
    const auto norm = record->known_norm();
    if (!norm.defined()) {
      return norm;
    }
    const auto here = norm.to(state.scale_tensor().device(), at::kFloat);
    total = total.defined() ? at::hypot(total, here) : here;
  }
  return total;
}

void GradScaler::Impl::finish_iteration(const std::vector<scaler::Outcome>& outcomes) {
  if (capturing) {
    captured = outcomes;
  } else {
    notes.expect(state.scale_tensor(), outcomes);
  }
  std::erase_if(records, [](const auto& entry) {
    return entry.first == entry.second.get() || entry.second->is_orphaned();
  });
  std::vector<std::optional<scaler::PassResult>> ended;  // Go when no record is looked at.
  ended.reserve(records.size());
  for (auto& [optimizer, record] : records) {
    ended.push_back(record->start_iteration());
  }
}

std::vector<scaler::RecordPointer> GradScaler::Impl::records_in_use() const {
  std::vector<scaler::RecordPointer> used;
  for (const auto& [optimizer, record] : records) {
    if (record->first_pass != 0) {
      used.push_back(record);
    }
  }
  std::ranges::sort(used, {}, [](const auto& record) { return record->first_pass; });
  return used;
}

std::vector<scaler::Outcome> GradScaler::Impl::outcomes() const {
  std::vector<scaler::Outcome> result;
  for (const auto& record : records_in_use()) {
    auto flags = record->flags();
    if (!record->pass || flags.empty()) {
      continue;
    }
    scaler::Counts counts;
    for (const auto& device : record->pass->devices()) {
      counts.push_back(device.counts);
    }
    result.push_back({.record = record, .flags = std::move(flags), .counts = std::move(counts)});
  }
  return result;
}

void GradScaler::Impl::update(const at::Tensor& new_scale) {
  const auto ended = outcomes();
  TORCH_CHECK(!ended.empty() || new_scale.defined(),
              "update: expected unscale_() or step() on an optimizer with gradients before it, got "
              "neither. No inf checks were recorded prior to update.");
  if (ended.empty()) {
    state.set_scale(new_scale);
  } else {
    std::vector<at::Tensor> flags;
    for (const auto& outcome : ended) {
      flags.insert(flags.end(), outcome.flags.begin(), outcome.flags.end());
    }
    state.update(flags, state.keeps_history() ? iteration_norm() : at::Tensor(), new_scale);
  }
  finish_iteration(ended);
}

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
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
  impl_->notes.settle(/*wait=*/false);
  return impl_->enabled ? impl_->notes.scale() : 1.0;
}

bool GradScaler::step_was_skipped() {
  expect_not_moved_from("step_was_skipped");
  impl_->notes.settle(/*wait=*/true);
  return impl_->notes.skipped();
}

bool GradScaler::step_was_skipped_for(const torch::optim::Optimizer& optimizer) {
  expect_not_moved_from("step_was_skipped_for");
  impl_->notes.settle(/*wait=*/true);
  const auto found = impl_->records.find(&optimizer);
  return found != impl_->records.end() && found->second->recognises(optimizer) &&
         found->second->skipped;
}

OverflowReport GradScaler::overflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  expect_not_moved_from("overflow_report");
  impl_->notes.settle(/*wait=*/true);
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : named_parameters) {
    names[item.value().unsafeGetTensorImpl()] = item.key();
  }
  return impl_->notes.report(names);
}

std::vector<StepRecord> GradScaler::history() const {
  expect_not_moved_from("history");
  return impl_->state.history();
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

void GradScaler::Impl::set_rules(const char* function, const scaler::ScaleRules& rules) {
  if (enabled) {
    scaler::check_rules(function, rules);
  }
  state.rules() = rules;
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
  impl_->notes.settle(/*wait=*/true);
  result.history = state.history();
  result.overflow_report = impl_->notes.report({});
  result.skipped_in_a_row = impl_->notes.skipped_in_a_row();
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
  scaler::check_rules("load_state", rules);
  scaler::check_extras("load_state", rules, std::nullopt);
  scaler::check_counts("load_state", *state);
  scaler::check_notes("load_state", *state);
  impl_->state.rules() = rules;
  impl_->state.load(state->scale, state->growth_tracker,
                    state->hysteresis_tracker.value_or(rules.hysteresis));
  impl_->state.load_history(state->history);
  const auto iterations = state->history.empty() ? 0 : state->history.back().step + 1;
  // What was noted goes when the new notes are in its place: it may run code of others.
  const auto before = std::exchange(
      impl_->notes,
      scaler::StepNotes(state->scale, iterations, state->skipped_in_a_row, state->overflow_report));
}

}  // namespace fastamp
