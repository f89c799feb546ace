// SPDX-License-Identifier: Apache-2.0
#include <fastamp/autocast/guard.h>
#include <fastamp/c_api.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// NOLINTBEGIN(readability-identifier-naming): C's names
struct FastampRegion {
  fastamp::AutocastGuard guard;
};

struct FastampScaler {
  fastamp::GradScaler scaler;
};

struct FastampOptimizer {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  void (*set_lr)(torch::optim::OptimizerOptions& options, double lr);
};
// NOLINTEND(readability-identifier-naming)

namespace fastamp::c_api {
namespace {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

FastampStatus failed(FastampStatus status, const char* text) noexcept {
  try {
    last_error() = text;
  } catch (...) {  // No memory for a text: the code has to do.
    last_error().clear();
  }
  return status;
}

/// Runs what a C function does, and makes a code and a text of what it throws.
template <class Work>
FastampStatus guarded(Work&& work) noexcept {
  try {
    std::forward<Work>(work)();
    return FASTAMP_OK;
  } catch (const c10::OutOfMemoryError& error) {
    return failed(FASTAMP_OUT_OF_MEMORY, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    return failed(FASTAMP_VALUE_ERROR, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    return failed(FASTAMP_TYPE_ERROR, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    return failed(FASTAMP_NOT_IMPLEMENTED, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return failed(FASTAMP_ERROR, error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return failed(FASTAMP_OUT_OF_MEMORY, error.what());
  } catch (const std::exception& error) {
    return failed(FASTAMP_ERROR, error.what());
  } catch (...) {
    return failed(FASTAMP_ERROR, "an exception of no known type");
  }
}

/// Refuses a null pointer.
template <class Pointer>
Pointer* given(const char* function, const char* argument, Pointer* pointer) {
  TORCH_CHECK_VALUE(pointer != nullptr, function, ": expected ", argument, ", got NULL.");
  return pointer;
}

at::Tensor& tensor_of(const char* function, const char* argument, AtenTensorHandle handle) {
  given(function, argument, handle);
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
}

AtenTensorHandle handle_of(at::Tensor tensor) {
  return torch::aot_inductor::new_tensor_handle(std::move(tensor));
}

/// Refuses options of a version that lacks fields of the first one.
template <class Options>
void check_size(const char* function, const Options& options) {
  TORCH_CHECK_VALUE(options.size >= sizeof(Options), function, ": expected options of ",
                    sizeof(Options), " bytes, as fastamp_*_options_init() makes them, got size ",
                    options.size, ".");
}

c10::DeviceType device_type_of(const char* function, std::int32_t number) {
  TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int>(c10::COMPILE_TIME_MAX_DEVICE_TYPES),
                    function, ": expected a kind of device, as aoti_torch_device_type_cpu(), got ",
                    number, ".");
  return static_cast<c10::DeviceType>(number);
}

std::optional<c10::ScalarType> dtype_of(const char* function, std::int32_t number) {
  if (number == FASTAMP_DEFAULT_DTYPE) {
    return std::nullopt;
  }
  TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int>(c10::ScalarType::Undefined), function,
                    ": expected a dtype, as aoti_torch_dtype_bfloat16(), got ", number, ".");
  return static_cast<c10::ScalarType>(number);
}

std::vector<at::Tensor> parameters_of(const char* function, const AtenTensorHandle* parameters,
                                      std::size_t count) {
  TORCH_CHECK_VALUE(count > 0, function, ": expected parameters, got none.");
  given(function, "parameters", parameters);
  std::vector<at::Tensor> tensors;
  tensors.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    tensors.push_back(tensor_of(function, "a parameter", parameters[i]));
  }
  return tensors;
}

template <class Options>
void set_lr_of(torch::optim::OptimizerOptions& options, double lr) {
  static_cast<Options&>(options).lr(lr);
}

GradScalerState state_of(const char* function, const FastampScaler* scaler) {
  auto state = given(function, "a scaler", scaler)->scaler.state();
  TORCH_CHECK_VALUE(state.has_value(), function,
                    ": expected an enabled scaler, got a disabled one.");
  return *std::move(state);
}

}  // namespace
}  // namespace fastamp::c_api

namespace c_api = fastamp::c_api;

const char* fastamp_last_error() { return c_api::last_error().c_str(); }

FastampStatus fastamp_region_begin(std::int32_t device_type, std::int32_t dtype,
                                   std::int32_t enabled, FastampRegion** region) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_region_begin";
    c_api::given(function, "region", region);
    const auto device = c_api::device_type_of(function, device_type);
    *region = new FastampRegion{
        fastamp::AutocastGuard(device, c_api::dtype_of(function, dtype), enabled != 0)};
  });
}

FastampStatus fastamp_region_end(FastampRegion* region) {
  return c_api::guarded([&] { delete region; });
}

FastampStatus fastamp_scaler_options_init(FastampScalerOptions* options) {
  return c_api::guarded([&] {
    const fastamp::GradScalerOptions defaults;
    *c_api::given("fastamp_scaler_options_init", "options", options) = {
        .size = sizeof(FastampScalerOptions),
        .device_type = static_cast<std::int32_t>(c10::kCPU),
        .enabled = 1,
        .init_scale = defaults.init_scale(),
        .growth_factor = defaults.growth_factor(),
        .backoff_factor = defaults.backoff_factor(),
        .growth_interval = defaults.growth_interval()};
  });
}

FastampStatus fastamp_scaler_new(const FastampScalerOptions* options, FastampScaler** scaler) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_new";
    c_api::given(function, "scaler", scaler);
    FastampScalerOptions chosen;
    fastamp_scaler_options_init(&chosen);
    if (options != nullptr) {
      c_api::check_size(function, *options);
      chosen = *options;
    }
    *scaler = new FastampScaler{
        fastamp::GradScaler(fastamp::GradScalerOptions()
                                .device(c_api::device_type_of(function, chosen.device_type))
                                .enabled(chosen.enabled != 0)
                                .init_scale(chosen.init_scale)
                                .growth_factor(chosen.growth_factor)
                                .backoff_factor(chosen.backoff_factor)
                                .growth_interval(chosen.growth_interval))};
  });
}

FastampStatus fastamp_scaler_free(FastampScaler* scaler) {
  return c_api::guarded([&] { delete scaler; });
}

FastampStatus fastamp_scaler_scale(FastampScaler* scaler, AtenTensorHandle outputs,
                                   AtenTensorHandle* scaled) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_scale";
    c_api::given(function, "scaled", scaled);
    const auto& tensor = c_api::tensor_of(function, "outputs", outputs);
    *scaled = c_api::handle_of(c_api::given(function, "a scaler", scaler)->scaler.scale(tensor));
  });
}

FastampStatus fastamp_scaler_unscale(FastampScaler* scaler, FastampOptimizer* optimizer) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_unscale";
    c_api::given(function, "a scaler", scaler)
        ->scaler.unscale_(*c_api::given(function, "an optimizer", optimizer)->optimizer);
  });
}

FastampStatus fastamp_scaler_clip_grad_norm(FastampScaler* scaler, FastampOptimizer* optimizer,
                                            double max_norm, double norm_type,
                                            AtenTensorHandle* total_norm) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_clip_grad_norm";
    auto norm =
        c_api::given(function, "a scaler", scaler)
            ->scaler.clip_grad_norm_(*c_api::given(function, "an optimizer", optimizer)->optimizer,
                                     max_norm, norm_type);
    if (total_norm != nullptr) {
      *total_norm = c_api::handle_of(std::move(norm));
    }
  });
}

FastampStatus fastamp_scaler_step(FastampScaler* scaler, FastampOptimizer* optimizer) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_step";
    c_api::given(function, "a scaler", scaler)
        ->scaler.step(*c_api::given(function, "an optimizer", optimizer)->optimizer);
  });
}

FastampStatus fastamp_scaler_update(FastampScaler* scaler) {
  return c_api::guarded(
      [&] { c_api::given("fastamp_scaler_update", "a scaler", scaler)->scaler.update(); });
}

FastampStatus fastamp_scaler_get_scale(const FastampScaler* scaler, double* scale) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_get_scale";
    c_api::given(function, "scale", scale);
    *scale = c_api::given(function, "a scaler", scaler)->scaler.get_scale();
  });
}

FastampStatus fastamp_scaler_step_was_skipped(FastampScaler* scaler, std::int32_t* skipped) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_step_was_skipped";
    c_api::given(function, "skipped", skipped);
    *skipped = c_api::given(function, "a scaler", scaler)->scaler.step_was_skipped() ? 1 : 0;
  });
}

FastampStatus fastamp_scaler_get_state(const FastampScaler* scaler, double* scale,
                                       std::int64_t* growth_tracker) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_scaler_get_state";
    c_api::given(function, "scale", scale);
    c_api::given(function, "growth_tracker", growth_tracker);
    const auto state = c_api::state_of(function, scaler);
    *scale = state.scale;
    *growth_tracker = state.growth_tracker;
  });
}

FastampStatus fastamp_scaler_set_state(FastampScaler* scaler, double scale,
                                       std::int64_t growth_tracker) {
  return c_api::guarded([&] {
    auto state = c_api::state_of("fastamp_scaler_set_state", scaler);
    state.scale = scale;
    state.growth_tracker = growth_tracker;
    scaler->scaler.load_state(state);
  });
}

FastampStatus fastamp_sgd_options_init(FastampSgdOptions* options) {
  return c_api::guarded([&] {
    const fastamp::optim::SGDOptions defaults(1e-3);
    *c_api::given("fastamp_sgd_options_init", "options", options) = {
        .size = sizeof(FastampSgdOptions),
        .lr = defaults.lr(),
        .momentum = defaults.momentum(),
        .dampening = defaults.dampening(),
        .weight_decay = defaults.weight_decay(),
        .nesterov = defaults.nesterov() ? 1 : 0,
        .maximize = defaults.maximize() ? 1 : 0};
  });
}

FastampStatus fastamp_sgd_new(const AtenTensorHandle* parameters, std::size_t count,
                              const FastampSgdOptions* options, FastampOptimizer** optimizer) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_sgd_new";
    using Options = fastamp::optim::SGDOptions;
    c_api::given(function, "optimizer", optimizer);
    FastampSgdOptions chosen;
    fastamp_sgd_options_init(&chosen);
    if (options != nullptr) {
      c_api::check_size(function, *options);
      chosen = *options;
    }
    const auto made = Options(chosen.lr)
                          .momentum(chosen.momentum)
                          .dampening(chosen.dampening)
                          .weight_decay(chosen.weight_decay)
                          .nesterov(chosen.nesterov != 0)
                          .maximize(chosen.maximize != 0);
    *optimizer = new FastampOptimizer{.optimizer = std::make_unique<fastamp::optim::SGD>(
                                          c_api::parameters_of(function, parameters, count), made),
                                      .set_lr = c_api::set_lr_of<Options>};
  });
}

FastampStatus fastamp_adamw_options_init(FastampAdamWOptions* options) {
  return c_api::guarded([&] {
    const fastamp::optim::AdamWOptions defaults;
    *c_api::given("fastamp_adamw_options_init", "options", options) = {
        .size = sizeof(FastampAdamWOptions),
        .lr = defaults.lr(),
        .beta1 = std::get<0>(defaults.betas()),
        .beta2 = std::get<1>(defaults.betas()),
        .eps = defaults.eps(),
        .weight_decay = defaults.weight_decay(),
        .amsgrad = defaults.amsgrad() ? 1 : 0};
  });
}

FastampStatus fastamp_adamw_new(const AtenTensorHandle* parameters, std::size_t count,
                                const FastampAdamWOptions* options, FastampOptimizer** optimizer) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_adamw_new";
    using Options = fastamp::optim::AdamWOptions;
    c_api::given(function, "optimizer", optimizer);
    FastampAdamWOptions chosen;
    fastamp_adamw_options_init(&chosen);
    if (options != nullptr) {
      c_api::check_size(function, *options);
      chosen = *options;
    }
    const auto made = Options(chosen.lr)
                          .betas({chosen.beta1, chosen.beta2})
                          .eps(chosen.eps)
                          .weight_decay(chosen.weight_decay)
                          .amsgrad(chosen.amsgrad != 0);
    *optimizer = new FastampOptimizer{.optimizer = std::make_unique<fastamp::optim::AdamW>(
                                          c_api::parameters_of(function, parameters, count), made),
                                      .set_lr = c_api::set_lr_of<Options>};
  });
}

FastampStatus fastamp_optimizer_free(FastampOptimizer* optimizer) {
  return c_api::guarded([&] { delete optimizer; });
}

FastampStatus fastamp_optimizer_step(FastampOptimizer* optimizer) {
  return c_api::guarded([&] {
    c_api::given("fastamp_optimizer_step", "an optimizer", optimizer)->optimizer->step();
  });
}

FastampStatus fastamp_optimizer_zero_grad(FastampOptimizer* optimizer) {
  return c_api::guarded([&] {
    c_api::given("fastamp_optimizer_zero_grad", "an optimizer", optimizer)->optimizer->zero_grad();
  });
}

FastampStatus fastamp_optimizer_set_lr(FastampOptimizer* optimizer, double lr) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_optimizer_set_lr";
    c_api::given(function, "an optimizer", optimizer);
    TORCH_CHECK_VALUE(lr >= 0, function, ": expected lr of at least 0, got ", lr, ".");
    for (auto& group : optimizer->optimizer->param_groups()) {
      optimizer->set_lr(group.options(), lr);
    }
  });
}

FastampStatus fastamp_tensor_set_requires_grad(AtenTensorHandle tensor,
                                               std::int32_t requires_grad) {
  return c_api::guarded([&] {
    c_api::tensor_of("fastamp_tensor_set_requires_grad", "a tensor", tensor)
        .set_requires_grad(requires_grad != 0);
  });
}

FastampStatus fastamp_tensor_backward(AtenTensorHandle loss) {
  return c_api::guarded(
      [&] { c_api::tensor_of("fastamp_tensor_backward", "a loss", loss).backward(); });
}

FastampStatus fastamp_tensor_grad(AtenTensorHandle tensor, AtenTensorHandle* gradient) {
  return c_api::guarded([&] {
    const char* const function = "fastamp_tensor_grad";
    c_api::given(function, "gradient", gradient);
    const auto& found = c_api::tensor_of(function, "a tensor", tensor).grad();
    *gradient = found.defined() ? c_api::handle_of(found) : nullptr;
  });
}
