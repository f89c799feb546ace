#include "scaler/cuda_graph.h"
#include "scaler/grad_scaler_impl.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/gated_optimizer.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fastamp {
namespace {

using Inputs = std::vector<at::Tensor>;

optim::GatedOptimizer& gated(torch::optim::Optimizer& optimizer) {
  auto* result = dynamic_cast<optim::GatedOptimizer*>(&optimizer);
  TORCH_CHECK_VALUE(result != nullptr,
                    "GraphedStep: expected an optimizer of fastamp::optim, got another");
  return *result;
}

void check(const Inputs& inputs, const GraphedStepOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty(), "GraphedStep: expected at least one sample input, got none");
  TORCH_CHECK_VALUE(options.accumulation() >= 1, "GraphedStep: expected accumulation >= 1, got ",
                    options.accumulation());
  TORCH_CHECK_VALUE(options.warmup() >= 1, "GraphedStep: expected warmup >= 1, got ",
                    options.warmup());
  for (const auto& input : inputs) {
    TORCH_CHECK_VALUE(input.defined() && input.device() == inputs.front().device(),
                      "GraphedStep: expected sample inputs on one device, got several");
    TORCH_CHECK_VALUE(
        options.accumulation() == 1 ||
            (input.dim() > 0 && input.size(0) % options.accumulation() == 0),
        "GraphedStep: expected inputs whose first dimension is a multiple of accumulation (",
        options.accumulation(), "), got shape ", input.sizes());
  }
}

}  // namespace

struct GraphedStep::Impl {
  Impl(LossFunction function, torch::optim::Optimizer& of, GradScaler& with, const Inputs& samples,
       const GraphedStepOptions& given)
      : loss(std::move(function)),
        optimizer(of),
        gate(gated(of)),
        grad_scaler(with),
        scaler_impl(*with.impl_),
        options(given) {
    check(samples, given);
    for (const auto& sample : samples) {
      inputs.push_back(sample.detach().clone());
    }
    if (!samples.front().is_cpu()) {
      capture();
    }
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

  at::Tensor forward_and_backward(const Inputs& whole) {
    const at::AutoGradMode grad_mode(true);
    optimizer.zero_grad();
    at::Tensor total;
    for (int64_t i = 0; i < options.accumulation(); ++i) {
      at::Tensor value;
      {
        std::optional<AutocastGuard> region;
        if (const auto dtype = options.dtype()) {
          region.emplace(whole.front().device().type(), *dtype);
        }
        value = loss(part(whole, i));
      }
      value = options.accumulation() > 1 ? value / options.accumulation() : value;
      grad_scaler.scale(value).backward();
      total = total.defined() ? total + value.detach() : value.detach();
    }
    return total;
  }

  at::Tensor run(const Inputs& whole) {
    auto value = forward_and_backward(whole);
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

  /// Makes everything that a step makes at its first run, and changes nothing: what is allocated
  /// while a graph is captured would be made anew, and zeroed, by each replay.
  void warm() {
    for (int64_t i = 0; i < options.warmup(); ++i) {
      forward_and_backward(inputs);
    }
    auto& record = scaler_impl.record_of(optimizer);
    if (scaler_impl.enabled) {
      scaler_impl.check(optimizer, record, std::nullopt);
    }
    record.start_iteration();
    optim::StepGate skipping;
    skipping.found_inf = at::full({}, 1.0, at::TensorOptions(at::kFloat).device(device()));
    skipping.write_grads = false;
    gate.set_gate(skipping);
    optimizer.step();
    optimizer.zero_grad();
  }

  void capture() {
    for (const auto& group : optimizer.param_groups()) {
      last_rates.push_back(group.options().get_lr());
      rates.push_back(
          at::full({}, last_rates.back(), at::TensorOptions(at::kDouble).device(device())));
    }
    gate.set_learning_rates(rates);
    scaler_impl.capturing = true;
    const auto end = [&] {
      gate.clear_gate();
      gate.set_learning_rates({});
      scaler_impl.capturing = false;
    };
    try {
      graph =
          scaler::capture_graph(device(), [&] { warm(); }, [&] { captured_loss = run(inputs); });
    } catch (...) {
      end();
      throw;
    }
    end();
    outcomes = std::exchange(scaler_impl.captured, {});
  }

  at::Tensor replay(const Inputs& given) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i].copy_(given[i], /*non_blocking=*/true);
    }
    for (std::size_t i = 0; i < rates.size(); ++i) {
      const double rate = optimizer.param_groups()[i].options().get_lr();
      if (rate != last_rates[i]) {
        rates[i].fill_(rate);
        last_rates[i] = rate;
      }
    }
    graph->replay();
    if (scaler_impl.enabled) {
      scaler_impl.notes.expect(scaler_impl.state.scale_tensor(), outcomes);
    }
    return captured_loss.clone();
  }

  c10::Device device() const { return inputs.front().device(); }

  LossFunction loss;
  torch::optim::Optimizer& optimizer;
  optim::GatedOptimizer& gate;
  GradScaler& grad_scaler;
  GradScaler::Impl& scaler_impl;
  GraphedStepOptions options;
  Inputs inputs;
  std::vector<at::Tensor> rates;
  std::vector<double> last_rates;
  std::unique_ptr<scaler::CapturedGraph> graph;
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

at::Tensor GraphedStep::operator()(const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(inputs.size() == impl_->inputs.size(), "GraphedStep: expected ",
                    impl_->inputs.size(), " inputs, got ", inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& sample = impl_->inputs[i];
    TORCH_CHECK_VALUE(inputs[i].defined() && inputs[i].sizes() == sample.sizes() &&
                          inputs[i].scalar_type() == sample.scalar_type() &&
                          inputs[i].device() == sample.device(),
                      "GraphedStep: expected input ", i, " of shape ", sample.sizes(), ", dtype ",
                      sample.scalar_type(), ", on ", sample.device(), ", as the sample, got ",
                      inputs[i].toString(), " of shape ", inputs[i].sizes());
  }
  return is_graphed() ? impl_->replay(inputs) : impl_->run(inputs);
}

bool GraphedStep::is_graphed() const noexcept { return impl_->graph != nullptr; }

}  // namespace fastamp
