// SPDX-License-Identifier: Apache-2.0
#include "faults/every_allocation.h"
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::test::fail_every_allocation;
using fastamp::test::LeavesNoTrace;
using fastamp::test::Seen;
using fastamp::test::Subject;

namespace ours = fastamp::optim;

namespace {

/// Values that differ, so that a part that is missing shows.
at::Tensor numbers(std::vector<int64_t> sizes, double factor = 1.0) {
  const auto count = c10::multiply_integers(sizes);
  return ((at::arange(count, at::kFloat) * 0.37).sin() * factor).reshape(sizes);
}

struct Forward {
  at::Tensor weight = numbers({4, 4}).requires_grad_(true);
  at::Tensor input = numbers({3, 4});
  std::vector<at::Tensor> results;

  /// Each kind of policy, a weight used twice and a view of it.
  void run() {
    std::vector<at::Tensor> found;
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      const auto first = at::mm(input, weight);
      const auto second = at::mm(first, weight.t());
      const auto third = at::softmax(second, 1);
      found = {first, second, third, at::cat({second, third})};
    }
    results = found;
  }

  Seen look() const {
    Seen seen;
    for (const auto& result : results) {
      seen.add(result);
    }
    return seen.add(weight).add(weight.grad()).add("uses " + std::to_string(weight.use_count()));
  }
};

Subject forward_subject(const std::function<void(Forward&)>& call) {
  auto forward = std::make_shared<Forward>();
  return {[=] { call(*forward); }, [=] { return forward->look(); }, forward};
}

/// Three parameters of two dtypes in two groups, an optimizer, and a scaler that has its scale.
template <typename Optimizer, typename Options>
struct Training {
  explicit Training(const Options& options, const GradScalerOptions& scaling, bool bf16 = true)
      : options(options), scaler(GradScalerOptions(scaling).device(c10::kCPU)) {
    parameters = {numbers({4, 3}), numbers({4, 2}, 2.0), numbers({8, 2}, 0.5)};
    if (bf16) {
      parameters[1] = parameters[1].to(at::kBFloat16);
    }
    for (auto& parameter : parameters) {
      parameter.requires_grad_(true);
    }
    using Group = torch::optim::OptimizerParamGroup;
    std::vector<Group> groups;
    groups.emplace_back(std::vector<at::Tensor>{parameters[0], parameters[1]});
    groups.emplace_back(std::vector<at::Tensor>{parameters[2]});
    optimizer = std::make_unique<Optimizer>(groups, options);
    scaler.scale(at::ones({}));
    fill();
  }

  void fill(double factor = 100.0) {
    for (auto& parameter : parameters) {
      parameter.mutable_grad() =
          numbers(parameter.sizes().vec(), factor).to(parameter.scalar_type());
    }
  }

  Seen look() const {
    Seen seen;
    for (const auto& parameter : parameters) {
      seen.add(parameter).add(parameter.grad());
      const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
      seen.add(found == optimizer->state().end() ? "no state" : "state");
    }
    std::ostringstream text;
    text << scaler.state().value() << scaler.history().size();
    return seen.add(text.str());
  }

  Options options;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler;
};

using Call = std::function<void(GradScaler&, torch::optim::Optimizer&)>;

template <typename Optimizer, typename Options>
std::function<Subject()> training(const Options& options, const Call& call,
                                  const GradScalerOptions& scaling = {}, const Call& first = {}) {
  return [=]() -> Subject {
    auto subject = std::make_shared<Training<Optimizer, Options>>(options, scaling);
    if (first) {
      first(subject->scaler, *subject->optimizer);
    }
    return {[=] { call(subject->scaler, *subject->optimizer); }, [=] { return subject->look(); },
            subject};
  };
}

void unscale(GradScaler& scaler, torch::optim::Optimizer& optimizer) { scaler.unscale_(optimizer); }
void step(GradScaler& scaler, torch::optim::Optimizer& optimizer) { scaler.step(optimizer); }
void whole(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "memory that fails in a region leaves it whole", "[faults]") {
  SECTION("entering and leaving") {
    fail_every_allocation([] {
      return forward_subject([](Forward& /*forward*/) {
        const AutocastGuard region(c10::kCPU, c10::kBFloat16);
        const AutocastGuard inner(c10::kCPU, c10::kHalf, true, false);
      });
    });
  }
  SECTION("casts") {
    CHECK(fail_every_allocation(
              [] { return forward_subject([](Forward& forward) { forward.run(); }); }) > 20);
  }
  SECTION("casts in a region that goes on") {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    fail_every_allocation([] { return forward_subject([](Forward& forward) { forward.run(); }); });
  }
  SECTION("a trace") {
    fail_every_allocation([] {
      return forward_subject([](Forward& forward) {
        const fastamp::Trace trace;
        Forward inner = forward;
        inner.run();
        const auto text = trace.to_json() + trace.table();
        forward.results = {at::full({}, static_cast<double>(text.size())), inner.results.back()};
      });
    });
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "memory that fails under kept casts leaves them whole",
                 "[faults]") {
  SECTION("kept") {
    fail_every_allocation([] {
      auto kept = std::make_shared<std::optional<fastamp::KeepCasts>>();
      auto subject = forward_subject([kept](Forward& forward) {
        if (!*kept) {
          kept->emplace(std::vector<at::Tensor>{forward.weight});
        }
        forward.run();
      });
      return subject;
    });
  }
  SECTION("together") {
    fail_every_allocation([] {
      auto together = std::make_shared<std::optional<fastamp::CastTogether>>();
      return forward_subject([together](Forward& forward) {
        if (!*together) {
          together->emplace(std::vector<at::Tensor>{forward.weight});
        }
        forward.run();
      });
    });
  }
}

TEST_CASE("memory that fails in a scaler's call leaves gradients and scaler as they were",
          "[faults]") {
  using torch::optim::SGD;
  using torch::optim::SGDOptions;
  const SGDOptions options(0.1);
  SECTION("unscale_") { fail_every_allocation(training<SGD>(options, unscale)); }
  SECTION("unscale_ of an overflow") {
    fail_every_allocation(training<SGD>(
        options, unscale, {}, [](GradScaler& /*scaler*/, torch::optim::Optimizer& optimizer) {
          optimizer.param_groups()[1].params()[0].mutable_grad()[0][1] = INFINITY;
        }));
  }
  SECTION("clip_grad_norm_") {
    const double order = GENERATE(2.0, 1.0);
    fail_every_allocation(
        training<SGD>(options, [order](GradScaler& scaler, torch::optim::Optimizer& optimizer) {
          scaler.clip_grad_norm_(optimizer, 0.1, order);
        }));
  }
  SECTION("clip_grad_value_") {
    fail_every_allocation(
        training<SGD>(options, [](GradScaler& scaler, torch::optim::Optimizer& optimizer) {
          scaler.clip_grad_value_(optimizer, 0.1);
        }));
  }
  SECTION("update") {
    fail_every_allocation(training<SGD>(
        options,
        [](GradScaler& scaler, torch::optim::Optimizer& /*optimizer*/) { scaler.update(); },
        GradScalerOptions().history_size(4).hysteresis(2), step));
  }
  SECTION("scale") {
    fail_every_allocation(
        training<SGD>(options, [](GradScaler& scaler, torch::optim::Optimizer& optimizer) {
          auto scaled = scaler.scale(optimizer.param_groups()[0].params()[0].sum());
          scaled = at::Tensor();
        }));
  }
}
