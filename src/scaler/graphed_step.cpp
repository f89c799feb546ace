// SPDX-License-Identifier: Apache-2.0
#include "core/cuda_part.h"
#include "core/device_copy.h"
#include "core/tensor_version.h"
#include "core/text.h"
#include "scaler/grad_scaler_impl.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/amp_step_optimizer.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <ostream>
#include <utility>

namespace fastamp {
namespace {

using Inputs = std::vector<at::Tensor>;

optim::AmpStepOptimizer& amp_step_optimizer(torch::optim::Optimizer& optimizer) {
  auto* result = dynamic_cast<optim::AmpStepOptimizer*>(&optimizer);
  TORCH_CHECK_VALUE(result != nullptr,
                    "GraphedStep: expected an optimizer of fastamp::optim, got another");
  return *result;
}

void check_options(const GraphedStepOptions& options) {
  const auto dtype = options.dtype();
  TORCH_CHECK_VALUE(!dtype || *dtype == at::kHalf || *dtype == at::kBFloat16,
                    "GraphedStep: expected dtype to be kHalf or kBFloat16, got ", *dtype,
                    ". Say autocast(false) for a step without an autocast region.");
  TORCH_CHECK_VALUE(!dtype || options.autocast(),
                    "GraphedStep: expected no dtype with autocast(false), got ", *dtype);
  TORCH_CHECK_VALUE(!options.max_norm() || *options.max_norm() >= 0.0,
                    "GraphedStep: expected max_norm >= 0, got ", *options.max_norm());
  TORCH_CHECK_VALUE(!options.clip_value() || *options.clip_value() >= 0.0,
                    "GraphedStep: expected clip_value >= 0, got ", *options.clip_value());
  TORCH_CHECK_VALUE(options.accumulation() >= 1, "GraphedStep: expected accumulation >= 1, got ",
                    options.accumulation());
  TORCH_CHECK_VALUE(options.warmup() >= 1, "GraphedStep: expected warmup >= 1, got ",
                    options.warmup());
}

void check_samples(const Inputs& inputs, const GraphedStepOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty(), "GraphedStep: expected at least one sample input, got none");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    TORCH_CHECK_VALUE(input.defined(), "GraphedStep: expected sample input ", i,
                      " to be a tensor, got an undefined one");
    TORCH_CHECK_VALUE(input.device() == inputs.front().device(),
                      "GraphedStep: expected sample inputs on one device, got ",
                      inputs.front().device(), " and ", input.device());
    TORCH_CHECK_VALUE(
        options.accumulation() == 1 ||
            (input.dim() > 0 && input.size(0) % options.accumulation() == 0),
        "GraphedStep: expected inputs whose first dimension is a multiple of accumulation (",
        options.accumulation(), "), got shape ", input.sizes());
  }
}

void check_loss(const at::Tensor& loss) {
  TORCH_CHECK_VALUE(loss.defined(),
                    "GraphedStep: expected the loss function to return a tensor, got an undefined "
                    "one");
  TORCH_CHECK_VALUE(loss.numel() == 1,
                    "GraphedStep: expected the loss function to return one element, got shape ",
                    loss.sizes());
  TORCH_CHECK_VALUE(loss.requires_grad(),
                    "GraphedStep: expected the loss function to return a tensor that requires "
                    "gradients, got one that does not");
}

}  // namespace

struct GraphedStep::Impl {
  Impl(LossFunction function, torch::optim::Optimizer& of, GradScaler& with, const Inputs& samples,
       const GraphedStepOptions& given)
      : loss(std::move(function)),
        optimizer(of),
        amp_optimizer(amp_step_optimizer(of)),
        scaler_impl(with.impl_),
        options(given) {
    TORCH_CHECK_VALUE(loss != nullptr, "GraphedStep: expected a loss function, got an empty one");
    with.expect_not_moved_from("GraphedStep");
    check_options(given);
    check_samples(samples, given);
    for (const auto& sample : samples) {
      inputs.push_back(sample.detach().clone());
    }
    if (!samples.front().is_cpu()) {
      capture();
    }
  }

  /// The scaler, wherever it is now.
  GradScaler scaler_now() const {
    auto impl = scaler_impl.lock();
    TORCH_CHECK(
        impl != nullptr,
        "GraphedStep: expected the scaler that it was made with, got one that was destroyed "
        "or assigned to. Make a new GraphedStep.");
    return GradScaler(std::move(impl));
  }

  void expect_same_groups() const {
    const auto groups = optimizer.param_groups().size();
    TORCH_CHECK(
        groups > 0,
        "GraphedStep: expected the optimizer that it was made with, got one without groups, "
        "such as one that was moved from. Make a new GraphedStep.");
    TORCH_CHECK(graph == nullptr || groups == rates.size(), "GraphedStep: expected the ",
                rates.size(), " parameter groups of the capture, got ", groups,
                ". Make a new GraphedStep.");
  }

  Inputs part(const Inputs& whole, int64_t index) const {
    if (options.accumulation() == 1) {
      return whole;
    }
    Inputs result;
    for (const auto& input : whole) {
      const auto rows = input.size(0) / options.accumulation();
      result.push_back(input.narrow(0, index * rows, rows));
    }
    return result;
  }

  at::Tensor forward_and_backward(const Inputs& whole, GradScaler& grad_scaler) {
    const at::AutoGradMode grad_mode(true);
    optimizer.zero_grad();
    at::Tensor total;
    for (int64_t i = 0; i < options.accumulation(); ++i) {
      at::Tensor value;
      {
        std::optional<AutocastGuard> region;
        if (options.autocast()) {
          region.emplace(whole.front().device().type(), options.dtype());
        }
        value = loss(part(whole, i));
      }
      check_loss(value);
      value = options.accumulation() > 1 ? value / options.accumulation() : value;
      grad_scaler.scale(value).backward();
      total = total.defined() ? total + value.detach() : value.detach();
    }
    return total;
  }

  at::Tensor run(const Inputs& whole, GradScaler& grad_scaler) {
    auto value = forward_and_backward(whole, grad_scaler);
    if (const auto max_norm = options.max_norm()) {
      grad_scaler.clip_grad_norm_(optimizer, *max_norm);
    }
    if (const auto clip_value = options.clip_value()) {
      grad_scaler.clip_grad_value_(optimizer, *clip_value);
    }
    grad_scaler.step(optimizer);
    grad_scaler.update();
    return value;
  }

  /// Makes everything that a step makes for good at its first run, and changes nothing: what is
  /// allocated while a graph is captured would be made anew, and zeroed, by each replay. Needs
  /// gradients.
  void make_states(GradScaler& grad_scaler) {
    auto& scaler = *grad_scaler.impl_;
    if (scaler.enabled) {
      scaler.core.scale_history().prepare(scaler.state.scale_tensor());
      const auto record = scaler::record_of(scaler.core, optimizer);
      scaler.check(optimizer, *record);
      const auto pass = record->start_iteration();
    }
    optim::AmpStep skipping;
    skipping.found_inf = at::full({}, 1.0, at::TensorOptions(at::kFloat).device(device()));
    skipping.write_grads = false;
    amp_optimizer.set_amp_step(skipping);
    optimizer.step();
    optimizer.zero_grad();
  }

  void capture() {
    for (const auto& group : optimizer.param_groups()) {
      last_rates.push_back(group.options().get_lr());
      rates.push_back(
          at::full({}, last_rates.back(), at::TensorOptions(at::kDouble).device(device())));
    }
    amp_optimizer.set_learning_rates(rates);
    auto grad_scaler = scaler_now();
    auto& scaler = *grad_scaler.impl_;
    scaler.capturing = true;
    const auto end = [&] {
      amp_optimizer.clear_amp_step();
      amp_optimizer.set_learning_rates({});
      scaler.capturing = false;
    };
    try {
      const auto warm = [&] {
        for (int64_t i = 0; i < options.warmup(); ++i) {
          forward_and_backward(inputs, grad_scaler);
        }
      };
      graph = capture_graph({.warm = warm,
                             .states = [&] { make_states(grad_scaler); },
                             .work = [&] { captured_loss = run(inputs, grad_scaler); }});
    } catch (...) {
      end();
      throw;
    }
    end();
    outcomes = scaler.core.take_captured();
  }

  std::unique_ptr<CapturedGraph> capture_graph(const CapturePhases& phases) const {
    const auto* const part = cuda_part();
    TORCH_CHECK_NOT_IMPLEMENTED(part != nullptr, "GraphedStep: expected inputs on the CPU, since ",
                                cuda_part_refusal(), ", got ", device());
    return part->devices.capture_graph(device(), phases);
  }

  at::Tensor replay(const Inputs& given, GradScaler& grad_scaler) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      copy_into(inputs[i], given[i]);
    }
    for (std::size_t i = 0; i < rates.size(); ++i) {
      const double rate = optimizer.param_groups()[i].options().get_lr();
      if (rate != last_rates[i]) {
        rates[i].fill_(rate);
        last_rates[i] = rate;
      }
    }
    auto& scaler = *grad_scaler.impl_;
    if (scaler.enabled) {
      scaler.core.scale_history().refresh(scaler.state.scale_tensor());
    }
    graph->replay();
    note_writes();
    if (scaler.enabled) {
      scaler.core.note_replay(scaler.state.tensors(), outcomes);
      scaler.notify_of_iteration();
    }
    return captured_loss.clone();
  }

  /// A replay counts no writes, and caches of casts and norms ask for them.
  void note_writes() const {
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        bump_version(parameter);
        bump_version(parameter.grad());
      }
    }
  }

  c10::Device device() const { return inputs.front().device(); }

  LossFunction loss;
  torch::optim::Optimizer& optimizer;
  optim::AmpStepOptimizer& amp_optimizer;
  std::weak_ptr<GradScaler::Impl> scaler_impl;
  GraphedStepOptions options;
  Inputs inputs;
  std::vector<at::Tensor> rates;
  std::vector<double> last_rates;
  std::unique_ptr<CapturedGraph> graph;
  at::Tensor captured_loss;
  std::vector<scaler::Outcome> outcomes;
};

GraphedStep::GraphedStep(LossFunction loss, torch::optim::Optimizer& optimizer, GradScaler& scaler,
                         const std::vector<at::Tensor>& sample_inputs,
                         const GraphedStepOptions& options)
    : impl_(std::make_unique<Impl>(std::move(loss), optimizer, scaler, sample_inputs, options)) {}
GraphedStep::~GraphedStep() = default;
GraphedStep::GraphedStep(GraphedStep&&) noexcept = default;
GraphedStep& GraphedStep::operator=(GraphedStep&&) noexcept = default;

GraphedStep::Impl& GraphedStep::whole(const char* function) const {
  TORCH_CHECK(
      impl_ != nullptr, function,
      ": expected a step, got one that was moved from. Assign another one to it, or call the "
      "one that it was moved to.");
  return *impl_;
}

at::Tensor GraphedStep::operator()(const std::vector<at::Tensor>& inputs) {
  auto& step = whole("GraphedStep");
  TORCH_CHECK_VALUE(inputs.size() == step.inputs.size(), "GraphedStep: expected ",
                    step.inputs.size(), " inputs, got ", inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& sample = step.inputs[i];
    TORCH_CHECK_VALUE(inputs[i].defined(), "GraphedStep: expected input ", i,
                      " to be a tensor, got an undefined one");
    TORCH_CHECK_VALUE(inputs[i].sizes() == sample.sizes() &&
                          inputs[i].scalar_type() == sample.scalar_type() &&
                          inputs[i].device() == sample.device(),
                      "GraphedStep: expected input ", i, " of shape ", sample.sizes(), ", dtype ",
                      sample.scalar_type(), ", on ", sample.device(), ", as the sample, got ",
                      inputs[i].toString(), " of shape ", inputs[i].sizes());
  }
  auto scaler = step.scaler_now();
  step.expect_same_groups();
  return step.graph != nullptr ? step.replay(inputs, scaler) : step.run(inputs, scaler);
}

bool GraphedStep::is_graphed() const { return whole("is_graphed").graph != nullptr; }

std::ostream& operator<<(std::ostream& out, const GraphedStepOptions& options) {
  auto text = new_text();
  text << "autocast " << (options.autocast() ? "on" : "off");
  if (const auto dtype = options.dtype()) {
    text << ", dtype " << *dtype;
  }
  if (const auto max_norm = options.max_norm()) {
    text << ", max_norm " << *max_norm;
  }
  if (const auto clip_value = options.clip_value()) {
    text << ", clip_value " << *clip_value;
  }
  text << ", accumulation " << options.accumulation() << ", warmup " << options.warmup();
  return out << text.str();
}

}  // namespace fastamp
