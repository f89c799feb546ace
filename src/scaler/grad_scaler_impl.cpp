// SPDX-License-Identifier: Apache-2.0
#include "scaler/grad_scaler_impl.h"

#include "core/tensor_kind.h"
#include "scaler/call_step.h"
#include "scaler/option_checks.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <utility>
#include <vector>

namespace fastamp {

using scaler::LibTorchOptimizer;
using scaler::Stage;

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

/// Writes name and shape of an optimizer's parameter into a row of a report.
template <typename Row>
void describe(Row& row, const scaler::OptimizerRecord& record, std::size_t index,
              const ParameterNames& names) {
  row.name = "parameter " + std::to_string(index);
  row.index = index;
  // The optimizer had a parameter there when its gradient was counted.
  if (const auto parameter = scaler::handle_of(record).parameters.at(index).lock()) {
    if (has_geometry(at::Tensor(parameter))) {
      row.shape = parameter->sizes().vec();
    }
    const auto name = names.find(parameter.get());
    row.name = name != names.end() ? name->second : row.name;
  }
}

void append_rows(OverflowReport& report, const scaler::OptimizerRecord& record,
                 const scaler::Counts& counts, const ParameterNames& names) {
  for (const auto& [index, elements] : scaler::read_counts(counts)) {
    auto& row = report.gradients.emplace_back();
    describe(row, record, index, names);
    row.inf = elements.inf;
    row.nan = elements.nan;
  }
}

}  // namespace

ParameterNames names_by_identity(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  ParameterNames names;
  for (const auto& item : named_parameters) {
    names[item.value().unsafeGetTensorImpl()] = item.key();
  }
  return names;
}

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
          .agreement = options.agreement() ? &options.agreement() : nullptr};
}

Stage GradScaler::Impl::stage_of(const LibTorchOptimizer& port) const {
  const auto record = core.find(port);
  return record == nullptr ? Stage::kReady : port.stage(*record);
}

void GradScaler::Impl::check_iteration(const char* function, const LibTorchOptimizer& port,
                                       const scaler::ScalerCall& call) const {
  const auto record = core.find(port);
  TORCH_CHECK(record == nullptr || port.stage(*record) != Stage::kUnscaled ||
                  !scaler::ScalerCore::scaled_anew(port, *record, call),
              function,
              ": expected the gradients that unscale_() has divided by the scale, got others, and "
              "scale() was called since, so that they are scaled. After an iteration that was "
              "broken off, call update() before the next; to replace unscaled gradients, write "
              "into them.");
}

void GradScaler::Impl::update(const at::Tensor& new_scale) {
  std::vector<scaler::Outcome> ended;
  for (const auto& record : core.records_in_use()) {
    if (const auto& flags = scaler::handle_of(*record).flags; !flags.empty()) {
      ended.push_back({.record = record, .flags = flags, .counts = record->counts()});
    }
  }
  TORCH_CHECK(!ended.empty() || new_scale.defined(),
              "update: expected unscale_() or step() on an optimizer with gradients before it, got "
              "neither. No inf checks were recorded prior to update.");
  core.end_iteration(state.tensors(), state.rules(), ended, new_scale, capturing);
  tell_of_iteration();
}

void GradScaler::Impl::tell_of_iteration() {
  if (!capturing && core.skip_hooks().waits()) {
    core.log().settle(/*wait=*/true);
  }
  tell();
}

void GradScaler::Impl::settle(bool wait) {
  core.log().settle(wait);
  tell();
}

void GradScaler::Impl::tell() {
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

OverflowReport GradScaler::Impl::report(const ParameterNames& names) const {
  const auto& overflow = core.log().overflow();
  if (!overflow) {
    return loaded_report;
  }
  OverflowReport report;
  report.step = overflow->step;
  report.scale = overflow->scale;
  for (const auto& [record, counts] : overflow->optimizers) {
    append_rows(report, *record, counts, names);
  }
  return report;
}

UnderflowReport GradScaler::Impl::underflows(const ParameterNames& names) const {
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
        describe(row, *record, index, names);
        row.zeros = counted.zeros;
        row.elements = counted.elements;
      }
    }
  }
  return report;
}

std::optional<at::Tensor> GradScaler::Impl::step_if_finite(torch::optim::Optimizer& optimizer,
                                                           LibTorchOptimizer& port,
                                                           const scaler::ScalerCall& call) {
  const auto record = core.record_of(port);
  const bool fresh = port.stage(*record) == Stage::kReady;
  if (fresh) {
    core.unscale(port, call);
  }
  const auto flags = port.flags(*record);
  if (flags.empty() && fresh) {
    const auto pass = record->start_iteration();  // A refused call leaves no trace.
  }
  TORCH_CHECK(!flags.empty(), kNoGradients);
  bool finite = true;
  for (const auto& flag : flags) {
    finite = finite && flag.item<float>() == 0.0F;  // sync: the host decides on the step
  }
  std::optional<at::Tensor> result;
  if (finite) {
    result = scaler::call_step(optimizer);
  }
  port.set_stepped(*record);
  if (const auto pass = record->pass) {
    pass->forget();
  }
  return result;
}

void GradScaler::Impl::begin_clipping(const char* function, const LibTorchOptimizer& port,
                                      const scaler::ScalerCall& call) const {
  expect_scale(function);
  TORCH_CHECK(stage_of(port) != Stage::kStepped, function,
              ": expected a call before step(), got one after it; ", function,
              "() is being called after step().");
  check_iteration(function, port, call);
}

bool GradScaler::Impl::may_put_off(LibTorchOptimizer& port) const {
  return port.takes_gate(options.fuse()) && !port.has_sparse();
}

void GradScaler::Impl::set_rules(const char* function, const scaler::ScaleRules& rules) {
  if (enabled) {
    scaler::check_rules(function, rules);
  }
  state.rules() = rules;
}

}  // namespace fastamp
