// SPDX-License-Identifier: Apache-2.0
// Scalers and steps that were moved from or moved in mid-iteration, and arguments that are empty or
// undefined: errors of fastamp, and nothing changed.

#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/clip.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/ops/complex.h>
#include <torch/serialize.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::GraphedStep;
using fastamp::GraphedStepOptions;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;

namespace {

using Call = std::pair<std::string, std::function<void(GradScaler&)>>;

/// Every public call of a scaler, by the name that its errors begin with.
std::vector<Call> calls(torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& out,
                        torch::serialize::InputArchive& in) {
  return {
      {"scale", [](GradScaler& s) { s.scale(at::ones({})); }},
      {"scale", [](GradScaler& s) { s.scale(std::vector<at::Tensor>{at::ones({})}); }},
      {"unscale_", [&](GradScaler& s) { s.unscale_(optimizer); }},
      {"step", [&](GradScaler& s) { s.step(optimizer); }},
      {"clip_grad_norm_", [&](GradScaler& s) { s.clip_grad_norm_(optimizer, 1.0); }},
      {"clip_grad_value_", [&](GradScaler& s) { s.clip_grad_value_(optimizer, 1.0); }},
      {"update", [](GradScaler& s) { s.update(); }},
      {"update", [](GradScaler& s) { s.update(2.0); }},
      {"update", [](GradScaler& s) { s.update(at::ones({})); }},
      {"get_scale", [](GradScaler& s) { s.get_scale(); }},
      {"get_scale_async", [](GradScaler& s) { s.get_scale_async(); }},
      {"step_was_skipped", [](GradScaler& s) { s.step_was_skipped(); }},
      {"step_was_skipped_for", [&](GradScaler& s) { s.step_was_skipped_for(optimizer); }},
      {"overflow_report", [](GradScaler& s) { s.overflow_report(); }},
      {"history", [](GradScaler& s) { s.history(); }},
      {"get_growth_factor", [](GradScaler& s) { s.get_growth_factor(); }},
      {"get_backoff_factor", [](GradScaler& s) { s.get_backoff_factor(); }},
      {"get_growth_interval", [](GradScaler& s) { s.get_growth_interval(); }},
      {"set_growth_factor", [](GradScaler& s) { s.set_growth_factor(3.0); }},
      {"set_backoff_factor", [](GradScaler& s) { s.set_backoff_factor(0.1); }},
      {"set_growth_interval", [](GradScaler& s) { s.set_growth_interval(3); }},
      {"is_enabled", [](GradScaler& s) { s.is_enabled(); }},
      {"state", [](GradScaler& s) { s.state(); }},
      {"load_state", [](GradScaler& s) { s.load_state(fastamp::GradScalerState()); }},
      {"save", [&](GradScaler& s) { s.save(out); }},
      {"load", [&](GradScaler& s) { s.load(in); }},
      {"GraphedStep",
       [](GradScaler& s) {
         SGD over({at::ones({2}).requires_grad_(true)}, SGDOptions(1.0));
         const GraphedStep step([](const auto& inputs) { return inputs[0]; }, over, s,
                                {at::ones({2})});
       }},
  };
}

struct Moved {
  GradScaler scaler = started(cpu_options().init_scale(8.0));
  at::Tensor parameter = parameter_with(4.0F);
  torch::optim::SGD optimizer = sgd({parameter});
};

/// A step that trains one weight by the mean of its product with the input.
struct OneWeight {
  at::Tensor weight = at::ones({2}).requires_grad_(true);
  SGD optimizer{Params{weight}, SGDOptions(1.0)};
  GradScaler scaler{cpu_options().init_scale(4.0)};

  GraphedStep step(GraphedStep::LossFunction loss) {
    return {std::move(loss), optimizer, scaler, {at::ones({2})}, GraphedStepOptions()};
  }
  GraphedStep step() {
    return step([this](const auto& inputs) { return (weight * inputs[0]).sum(); });
  }
};

std::string text_of(const std::function<void()>& call) { return error_text<c10::Error>(call); }

}  // namespace

TEST_CASE("misuse: every call on a scaler that was moved from is refused by name", "[scaler]") {
  const bool enabled = GENERATE(true, false);
  GradScaler source(cpu_options().enabled(enabled));
  const GradScaler target(std::move(source));
  auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  torch::serialize::OutputArchive out;
  torch::serialize::InputArchive in;
  for (const auto& [name, call] : calls(optimizer, out, in)) {
    INFO(name);
    // NOLINTNEXTLINE(bugprone-use-after-move): that is the test
    const auto text = text_of([&] { call(source); });
    CHECK(text.find(name + ": expected a scaler, got one that was moved from.") == 0);
  }
  CHECK(parameter.equal(at::ones({2})));
  CHECK(parameter.grad().equal(at::ones({2})));
  CHECK(target.is_enabled() == enabled);
}

TEST_CASE("misuse: assignment makes a scaler that was moved from whole again", "[scaler]") {
  Moved it;
  const GradScaler target(std::move(it.scaler));
  it.scaler = started(cpu_options().init_scale(2.0));
  it.scaler.step(it.optimizer);
  it.scaler.update();
  CHECK(it.parameter.equal(at::full({2}, -1.0)));
  CHECK(it.scaler.get_scale() == 2.0);
  CHECK(target.get_scale() == 8.0);
  auto& same = it.scaler;
  it.scaler = std::move(same);
  CHECK(it.scaler.get_scale() == 2.0);
}

TEST_CASE("misuse: a scaler that is moved goes on at every point of an iteration", "[scaler]") {
  const bool own = GENERATE(true, false);
  const int point = GENERATE(0, 1, 2, 3);
  auto parameter = parameter_with(8.0F);
  const std::unique_ptr<torch::optim::Optimizer> optimizer =
      own ? std::unique_ptr<torch::optim::Optimizer>(
                std::make_unique<SGD>(Params{parameter}, SGDOptions(1.0)))
          : std::make_unique<torch::optim::SGD>(sgd({parameter}));
  std::optional<GradScaler> scaler(cpu_options().init_scale(8.0));
  const auto move_at = [&](int here) {
    if (here == point) {
      GradScaler other(std::move(*scaler));
      scaler.emplace(std::move(other));
    }
  };
  move_at(0);
  scaler->scale(at::ones({}));
  move_at(1);
  scaler->unscale_(*optimizer);
  move_at(2);
  CHECK_THROWS_AS(scaler->unscale_(*optimizer), c10::Error);
  scaler->step(*optimizer);
  move_at(3);
  CHECK_THROWS_AS(scaler->step(*optimizer), c10::Error);
  scaler->update();
  CHECK(parameter.equal(at::zeros({2})));
  CHECK(scaler->history().size() == 1);
}

TEST_CASE("misuse: undefined tensors are refused, and nothing is changed", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(8.0));
  CHECK(text_of([&] { scaler.scale(at::Tensor()); }) ==
        "scale: expected a tensor, got an undefined one");
  CHECK(text_of([&] { scaler.scale(std::vector<at::Tensor>{at::ones({}), at::Tensor()}); }) ==
        "scale: expected outputs[1] to be a tensor, got an undefined one");
  CHECK(scaler.scale(std::vector<at::Tensor>{}).empty());
  CHECK_THROWS_AS(scaler.update(2.0), c10::Error);  // No scale was made.
  scaler.scale(at::ones({}));
  CHECK(text_of([&] { scaler.update(at::Tensor()); }) ==
        "update: expected new_scale to be a tensor, got an undefined one");
  CHECK(text_of([&] { fastamp::clip_grad_norm_({at::ones({}), at::Tensor()}, 1.0); }) ==
        "clip_grad_norm_: expected parameters[1] to be a tensor, got an undefined one");
  CHECK(scaler.get_scale() == 8.0);
  GradScaler disabled(cpu_options().enabled(false));
  CHECK_FALSE(disabled.scale(at::Tensor()).defined());
}

TEST_CASE("misuse: update takes one real element of any shape and refuses the rest", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(8.0));
  scaler.update(at::full({1}, 2.0));
  CHECK(scaler.get_scale() == 2.0);
  scaler.update(at::full({1, 1}, 4.0, at::kDouble));
  CHECK(scaler.get_scale() == 4.0);
  const std::vector<std::pair<at::Tensor, std::string>> refused = {
      {at::ones({2}), "one element, got shape [2]"},
      {at::ones({0}), "one element, got shape [0]"},
      {at::ones({}).requires_grad_(true), "without requires_grad"},
      {at::complex(at::ones({}), at::ones({})), "dense and real"},
      {at::ones({1}).to_sparse(), "dense and real"},
  };
  for (const auto& [tensor, part] : refused) {
    const auto text = error_text<c10::ValueError>([&, &tensor = tensor] { scaler.update(tensor); });
    CHECK(text.find("update: expected new_scale") == 0);
    CHECK(text.find(part) != std::string::npos);
  }
  for (const double value :
       {std::numeric_limits<double>::infinity(), 1e300, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(error_text<c10::ValueError>([&] {
            scaler.update(value);
          }).find("update: expected new_scale to be finite in float32, got") == 0);
  }
  CHECK(scaler.get_scale() == 4.0);
}

TEST_CASE("misuse: a step that was moved from is refused, and whole after assignment", "[scaler]") {
  OneWeight it;
  auto source = it.step();
  auto target = std::move(source);
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  CHECK(text_of([&] {
          source({at::ones({2})});
        }).find("GraphedStep: expected a step, got one that was moved from.") == 0);
  CHECK(text_of([&] { (void)source.is_graphed(); }).find("is_graphed: expected a step, got") == 0);
  // NOLINTEND(bugprone-use-after-move)
  CHECK(it.weight.equal(at::ones({2})));
  target({at::ones({2})});
  CHECK(it.weight.equal(at::zeros({2})));
  source = std::move(target);
  source({at::ones({2})});
  CHECK(it.weight.equal(at::full({2}, -1.0)));
}

TEST_CASE("misuse: a step follows the scaler that is moved, and refuses one that is gone",
          "[scaler]") {
  OneWeight it;
  auto step = it.step();
  step({at::ones({2})});
  std::optional<GradScaler> moved(std::move(it.scaler));
  step({at::full({2}, std::numeric_limits<float>::infinity())});
  CHECK(moved->get_scale() == 2.0);
  CHECK(moved->step_was_skipped());
  CHECK(it.weight.equal(at::zeros({2})));
  it.scaler = GradScaler(cpu_options());
  CHECK_NOTHROW(step({at::ones({2})}));
  CHECK(moved->history().size() == 3);
  const auto before = it.weight.clone();
  const bool assigned = GENERATE(true, false);
  if (assigned) {
    *moved = GradScaler(cpu_options());
  } else {
    moved.reset();
  }
  CHECK(text_of([&] { step({at::ones({2})}); })
            .find("GraphedStep: expected the scaler that it was made with, got one that was "
                  "destroyed or assigned to.") == 0);
  CHECK(it.weight.equal(before));
}

TEST_CASE("misuse: a step whose optimizer was moved from is refused", "[scaler]") {
  OneWeight it;
  auto step = it.step();
  const SGD taken(std::move(it.optimizer));
  CHECK(text_of([&] { step({at::ones({2})}); })
            .find("GraphedStep: expected the optimizer that it was made with, got one without "
                  "groups") == 0);
  CHECK(it.weight.equal(at::ones({2})));
  CHECK_FALSE(it.weight.grad().defined());
}

TEST_CASE("misuse: a step without a function or a usable loss is refused", "[scaler]") {
  OneWeight it;
  CHECK(error_text<c10::ValueError>([&] { it.step(nullptr); }) ==
        "GraphedStep: expected a loss function, got an empty one");
  CHECK(error_text<c10::ValueError>([&] {
          GraphedStep([](const auto& inputs) { return inputs[0]; }, it.optimizer, it.scaler,
                      {at::ones({2}), at::Tensor()});
        }) == "GraphedStep: expected sample input 1 to be a tensor, got an undefined one");
  CHECK(error_text<c10::ValueError>([&] { it.step()({at::Tensor()}); }) ==
        "GraphedStep: expected input 0 to be a tensor, got an undefined one");
  const std::vector<std::pair<at::Tensor, std::string>> losses = {
      {at::Tensor(), "to return a tensor, got an undefined one"},
      {at::ones({2}).requires_grad_(true), "to return one element, got shape [2]"},
      {at::ones({}), "requires gradients, got one that does not"},
  };
  for (const auto& [loss, part] : losses) {
    auto step = it.step([&loss = loss](const auto&) { return loss; });
    const auto text = error_text<c10::ValueError>([&] { step({at::ones({2})}); });
    CHECK(text.find("GraphedStep: expected the loss function") == 0);
    CHECK(text.find(part) != std::string::npos);
  }
  CHECK(it.weight.equal(at::ones({2})));
  CHECK(it.scaler.get_scale() == 4.0);
  it.step()({at::ones({2})});
  CHECK(it.weight.equal(at::zeros({2})));
  CHECK(it.scaler.history().size() == 1);
}
