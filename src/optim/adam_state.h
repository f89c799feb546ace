#pragma once

#include <fastamp/optim/adam.h>

#include <torch/optim/optimizer.h>

namespace fastamp::optim {

/// Brings a loaded state to the shape and place of its parameter.
void fit_adam_state(const char* function, AdamParamState& state, const at::Tensor& param,
                    c10::ScalarType dtype);

template <typename Options>
void fit_adam(const char* function, AdamParamState& state, const at::Tensor& param,
              const Options& options) {
  fit_adam_state(function, state, param, options.state_dtype());
}

/// A parameter that has not been stepped has no state in LibTorch's archives.
bool no_adam_state(const torch::optim::OptimizerParamState& state);

}  // namespace fastamp::optim
