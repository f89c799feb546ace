// SPDX-License-Identifier: Apache-2.0
#include "faults/training.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <sstream>
#include <string>

namespace fastamp::test {
namespace {

/// A tensor that a state may lack as long as it says nothing.
at::Tensor unless_zero(const at::Tensor& tensor) {
  return tensor.defined() && tensor.ne(0).any().item<bool>() ? tensor : at::Tensor();
}

/// A master that says more than its parameter.
at::Tensor unless_same(const at::Tensor& master, const at::Tensor& parameter) {
  return master.defined() && !master.equal(parameter.to(at::kFloat)) ? master : at::Tensor();
}

template <typename State>
bool look_at(Seen& seen, const torch::optim::OptimizerParamState& held,
             const at::Tensor& parameter) {
  const auto* const state = dynamic_cast<const State*>(&held);
  if (state == nullptr) {
    return false;
  }
  const auto add = [&](const at::Tensor& tensor) { seen.add(unless_zero(tensor)); };
  if constexpr (requires { state->exp_avg(); }) {
    add(state->exp_avg());
    add(state->exp_avg_sq());
    add(state->max_exp_avg_sq());
  }
  if constexpr (requires { state->momentum_buffer(); }) {
    add(state->momentum_buffer());
  }
  if constexpr (requires { state->moment_scales(); }) {
    add(state->moment_scales());
  }
  if constexpr (requires { state->steps(); }) {
    add(state->steps());
  }
  if constexpr (requires { state->master(); }) {
    seen.add(unless_same(state->master(), parameter));
    add(state->remainder());
  }
  if constexpr (requires { state->step(); }) {
    if (state->step() != 0) {
      seen.add(std::to_string(state->step()));
    }
  }
  return true;
}

}  // namespace

at::Tensor numbers(const std::vector<int64_t>& sizes, double factor) {
  const auto count = c10::multiply_integers(sizes);
  return ((at::arange(count, at::kFloat) * 0.37).sin() * factor).reshape(sizes);
}

Training::Training(const Parameters& shapes, const MakeOptimizer& make,
                   const GradScalerOptions& scaling)
    : scaler(GradScalerOptions(scaling).device(c10::kCPU)) {
  double factor = 2.0;
  for (const auto& shape : shapes) {
    auto parameter = numbers(shape.sizes().vec(), factor).to(shape.scalar_type());
    parameters.push_back(parameter.requires_grad_(true));
    factor /= 2;
  }
  optimizer = make(parameters);
  scaler.scale(at::ones({}));
  fill();
}

void Training::fill() {
  for (auto& parameter : parameters) {
    parameter.mutable_grad() = numbers(parameter.sizes().vec(), 100.0).to(parameter.scalar_type());
  }
  const auto& last = parameters.back();
  auto with_gaps = at::empty({last.numel(), 2}, last.grad().options()).select(1, 0);
  parameters.back().mutable_grad() =
      with_gaps.copy_(last.grad().reshape({-1})).unflatten(0, last.sizes());
}

Seen Training::look() const {
  const at::NoGradGuard no_grad;
  using torch::optim::AdamParamState;
  using torch::optim::AdamWParamState;
  Seen seen;
  for (const auto& parameter : parameters) {
    seen.add(parameter).add(parameter.grad());
    const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
    if (found != optimizer->state().end()) {
      const auto& held = *found->second;
      static_cast<void>(look_at<optim::SGDParamState>(seen, held, parameter) ||
                        look_at<optim::AdamParamState>(seen, held, parameter) ||
                        look_at<optim::AdamWParamState>(seen, held, parameter) ||
                        look_at<optim::MuonParamState>(seen, held, parameter) ||
                        look_at<torch::optim::SGDParamState>(seen, held, parameter) ||
                        look_at<AdamParamState>(seen, held, parameter) ||
                        look_at<AdamWParamState>(seen, held, parameter));
    }
    while (seen.tensors.size() % 10 != 0) {  // As with a state that says nothing.
      seen.add(at::Tensor());
    }
  }
  std::ostringstream text;
  text << scaler.state().value();
  for (const auto& row : scaler.history()) {
    text << "\n" << row.step << " " << row.scale << " " << row.skipped << " " << row.norm;
  }
  return seen.add(text.str());
}

MakeSubject training(const Parameters& shapes, const MakeOptimizer& make, const Call& call,
                     const GradScalerOptions& scaling, const Call& first) {
  return [=]() -> Subject {
    auto subject = std::make_shared<Training>(shapes, make, scaling);
    if (first) {
      first(*subject);
    }
    return {[=] { call(*subject); }, [=] { return subject->look(); }, subject};
  };
}

Parameters mixed_shapes() {
  return {at::empty({4, 3}), at::empty({4, 2}, at::kBFloat16), at::empty({5}), at::empty({8, 2})};
}

}  // namespace fastamp::test
