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
  };
}

bool usable(const GradScalerOptions& options) {
  if (options.enabled() && options.device() == c10::kCUDA && !torch::cuda::is_available()) {
    TORCH_WARN("GradScaler: expected a CUDA device for device=cuda, found none. Disabling.");
    return false;
  }
  return options.enabled();
}

void append_rows(OverflowReport& report, const scaler::OptimizerRecord& record,
                 const scaler::Counts& counts,
                 const std::unordered_map<const void*, std::string>& names) {
  const auto& parameters = scaler::handle_of(record).parameters;
  for (const auto& [index, elements] : scaler::read_counts(counts)) {
    NonFiniteGradient gradient{.name = "parameter " + std::to_string(index),
                               .index = index,
                               .shape = {},
                               .inf = elements.inf,
                               .nan = elements.nan};
    // The optimizer had a parameter there when they were counted.
    if (const auto parameter = parameters.at(index).lock()) {
      if (has_geometry(at::Tensor(parameter))) {
        gradient.shape = parameter->sizes().vec();
      }
      const auto name = names.find(parameter.get());
      gradient.name = name != names.end() ? name->second : gradient.name;
    }
    report.gradients.push_back(std::move(gradient));
  }
}

}  // namespace

GradScaler::Impl::Impl(const GradScalerOptions& given)
    : options(given),
      enabled(usable(given)),
      state(given.init_scale(), rules_of(given)),
      core(given.init_scale(), given.history_size()) {
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
  warn_if_due();
}

void GradScaler::Impl::settle(bool wait) {
  core.log().settle(wait);
  warn_if_due();
}

void GradScaler::Impl::warn_if_due() {
  if (const auto what = core.log().take_warning()) {
    TORCH_WARN("GradScaler: ", *what,
               ", so gradients are inf or NaN for a reason that a smaller scale does not cure. "
               "Look at overflow_report(model->named_parameters()) for the parameters concerned, "
               "at the loss and the inputs of that step for NaN, and at history() for when it "
               "began; a learning rate that is too high, a division by zero and a log or sqrt of "
               "zero are common causes.");
  }
}

OverflowReport GradScaler::Impl::report(
    const std::unordered_map<const void*, std::string>& names) const {
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
