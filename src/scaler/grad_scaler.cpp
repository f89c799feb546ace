#include "scaler/gradient_groups.h"
#include "scaler/option_checks.h"
#include "scaler/scale_state.h"

#include <fastamp/scaler/grad_scaler.h>

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace fastamp {
namespace {

enum class Stage : std::uint8_t { kReady, kUnscaled, kStepped };

struct OptimizerState {
  Stage stage = Stage::kReady;
  std::vector<scaler::DeviceFlag> flags;
};

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

struct GradScaler::Impl {
  explicit Impl(const GradScalerOptions& options)
      : device(options.device()),
        enabled(usable(options)),
        state(options.init_scale(), rules_of(options)) {
    scaler::check_extras("GradScaler", state.rules(), options.init_scale());
    if (enabled) {
      scaler::check_factors("GradScaler", state.rules());
    }
  }

  void expect_scale(const char* function) const {
    TORCH_CHECK(state.initialised(), function,
                ": expected scale() to have been called in this "
                "iteration, got no scale yet. _scale is None.");
  }

  // Looks without inserting, so that a refused call leaves no entry behind.
  Stage stage_of(const torch::optim::Optimizer& optimizer) const {
    const auto found = optimizers.find(&optimizer);
    return found == optimizers.end() ? Stage::kReady : found->second.stage;
  }

  std::vector<scaler::DeviceFlag> unscale_gradients(torch::optim::Optimizer& optimizer) const;
  void finish_iteration() { optimizers.clear(); }

  c10::DeviceType device;
  bool enabled;
  scaler::ScaleState state;
  std::unordered_map<const torch::optim::Optimizer*, OptimizerState> optimizers;
};

std::vector<scaler::DeviceFlag> GradScaler::Impl::unscale_gradients(
    torch::optim::Optimizer& optimizer) const {
  scaler::GradientGroups groups(/*allow_fp16=*/false);
  for (const auto& group : optimizer.param_groups()) {
    groups.reserve(group.params().size());
    for (const auto& parameter : group.params()) {
      const auto taken = groups.add(parameter);
      TORCH_CHECK_NOT_IMPLEMENTED(taken == scaler::GradientGroups::Taken::kYes,
                                  "unscale_: expected gradients that are plain tensors, got a "
                                  "Python tensor subclass; use the Python GradScaler for it.");
    }
  }
  return groups.unscale_(scaler::inverse_scale(state.scale_tensor()),
                         scaler::new_flag(state.scale_tensor()));
}

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  return impl_->enabled ? impl_->state.scaled(outputs) : outputs;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  return impl_->enabled ? impl_->state.scaled(outputs) : outputs;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("unscale_");
  const auto stage = impl_->stage_of(optimizer);
  TORCH_CHECK(
      stage != Stage::kUnscaled,
      "unscale_: expected one call per optimizer and iteration, got a second one; unscale_() "
      "has already been called on this optimizer since the last update().");
  TORCH_CHECK(
      stage != Stage::kStepped,
      "unscale_: expected a call before step(), got one after it; unscale_() is being called "
      "after step().");
  auto flags = impl_->unscale_gradients(optimizer);
  impl_->optimizers[&optimizer] = {.stage = Stage::kUnscaled, .flags = std::move(flags)};
}

std::optional<at::Tensor> GradScaler::step(torch::optim::Optimizer& optimizer,
                                           const torch::optim::Optimizer::LossClosure& closure) {
  if (!impl_->enabled) {
    return optimizer.step(closure);
  }
  TORCH_CHECK(!closure,
              "step: expected no closure while the scaler is enabled, got one. Closure use "
              "is not currently supported if GradScaler is enabled.");
  impl_->expect_scale("step");
  const auto stage = impl_->stage_of(optimizer);
  TORCH_CHECK(stage != Stage::kStepped,
              "step: expected one call per optimizer and iteration, got a second one; step() has "
              "already been called since the last update().");
  if (stage == Stage::kReady) {
    unscale_(optimizer);
  }
  auto& entry = impl_->optimizers[&optimizer];
  const bool any_gradient = !entry.flags.empty();
  if (!any_gradient && stage == Stage::kReady) {
    impl_->optimizers.erase(&optimizer);  // A refused call takes its own unscale_ back.
  }
  TORCH_CHECK(
      any_gradient,
      "step: expected an optimizer with at least one gradient, got none. No inf checks were "
      "recorded for this optimizer.");
  bool finite = true;
  for (const auto& flag : entry.flags) {
    finite = finite && flag.found_inf.item<float>() == 0.0F;  // sync: the host decides on the step
  }
  std::optional<at::Tensor> result;
  if (finite) {
    result = optimizer.step();
  }
  entry.stage = Stage::kStepped;
  return result;
}

void GradScaler::update() {
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("update");
  std::vector<at::Tensor> flags;
  for (const auto& [optimizer, entry] : impl_->optimizers) {
    for (const auto& flag : entry.flags) {
      flags.push_back(flag.found_inf);
    }
  }
  TORCH_CHECK(!flags.empty(),
              "update: expected unscale_() or step() on an optimizer with gradients before it, got "
              "neither. No inf checks were recorded prior to update.");
  impl_->state.update(flags);
  impl_->finish_iteration();
}

void GradScaler::update(double new_scale) {
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("update");
  scaler::check_within_bounds("update", "new_scale", impl_->state.rules(), new_scale);
  impl_->state.set_scale(new_scale);
  impl_->finish_iteration();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("update");
  TORCH_CHECK(new_scale.device().type() == impl_->device, "update: expected new_scale on a ",
              impl_->device, " device, got ", new_scale.device());
  TORCH_CHECK(new_scale.numel() == 1, "update: expected new_scale of one element, got shape ",
              new_scale.sizes());
  TORCH_CHECK(!new_scale.requires_grad(),
              "update: expected new_scale with requires_grad=False, got True");
  impl_->state.set_scale(new_scale);
  impl_->finish_iteration();
}

double GradScaler::get_scale() const { return impl_->enabled ? impl_->state.scale() : 1.0; }
double GradScaler::get_growth_factor() const { return impl_->state.rules().growth_factor; }
double GradScaler::get_backoff_factor() const { return impl_->state.rules().backoff_factor; }
int64_t GradScaler::get_growth_interval() const { return impl_->state.rules().growth_interval; }
void GradScaler::set_growth_factor(double growth_factor) {
  impl_->state.rules().growth_factor = growth_factor;
}
void GradScaler::set_backoff_factor(double backoff_factor) {
  impl_->state.rules().backoff_factor = backoff_factor;
}
void GradScaler::set_growth_interval(int64_t growth_interval) {
  impl_->state.rules().growth_interval = growth_interval;
}
bool GradScaler::is_enabled() const noexcept { return impl_->enabled; }

std::optional<GradScalerState> GradScaler::state() const {
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
  return result;
}

void GradScaler::load_state(const std::optional<GradScalerState>& state) {
  if (!impl_->enabled) {
    return;
  }
  TORCH_CHECK(state.has_value(),
              "load_state: expected the state of an enabled scaler, got an empty one. The source "
              "state dict is empty, possibly because it was saved from a disabled instance of "
              "GradScaler.");
  auto rules = impl_->state.rules();
  rules.growth_factor = state->growth_factor;
  rules.backoff_factor = state->backoff_factor;
  rules.growth_interval = state->growth_interval;
  rules.min_scale = state->min_scale ? state->min_scale : rules.min_scale;
  rules.max_scale = state->max_scale ? state->max_scale : rules.max_scale;
  rules.hysteresis = state->hysteresis.value_or(rules.hysteresis);
  scaler::check_extras("load_state", rules, std::nullopt);
  impl_->state.rules() = rules;
  impl_->state.load(state->scale, state->growth_tracker,
                    state->hysteresis_tracker.value_or(rules.hysteresis));
}

}  // namespace fastamp
