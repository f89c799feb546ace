// SPDX-License-Identifier: Apache-2.0
// Optimizers that were moved from.

#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>

#include <torch/optim/sgd.h>

#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
namespace optim = fastamp::optim;

namespace {

template <typename Optimizer>
std::string name_of() {
  return std::is_same_v<Optimizer, optim::SGD>    ? "SGD"
         : std::is_same_v<Optimizer, optim::Adam> ? "Adam"
                                                  : "AdamW";
}

}  // namespace

TEMPLATE_TEST_CASE("misuse: an optimizer that was moved from has no groups; the other goes on",
                   "[optim]", optim::SGD, optim::Adam, optim::AdamW) {
  Params params{at::ones({3}).requires_grad_(true)};
  auto reference = copy_of(params);
  TestType source(params, {0.5});
  TestType untouched(reference, {0.5});
  const auto step = [&](TestType& optimizer, Params& of) {
    of[0].mutable_grad() = at::full({3}, 2.0);
    optimizer.step();
  };
  step(source, params);
  step(untouched, reference);
  TestType target(std::move(source));
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  CHECK(source.param_groups().empty());
  CHECK_FALSE(source.step().defined());
  source.zero_grad();
  std::stringstream stream;
  CHECK_NOTHROW(torch::save(source, stream));
  CHECK(error_text<c10::Error>(
            [&] { source.add_param_group(torch::optim::OptimizerParamGroup(params)); })
            .find(name_of<TestType>() +
                  "::add_param_group: expected an optimizer, got one that was moved from") == 0);
  CHECK(params[0].grad().defined());
  step(target, params);
  step(untouched, reference);
  CHECK(equal(params, reference));
  source = std::move(target);
  step(source, params);
  step(untouched, reference);
  // NOLINTEND(bugprone-use-after-move)
  CHECK(equal(params, reference));
}

TEST_CASE("misuse: fuse and step of an optimizer of LibTorch's that was moved from", "[optim]") {
  Params params{at::ones({3}).requires_grad_(true)};
  torch::optim::SGD source(params, torch::optim::SGDOptions(0.5));
  const torch::optim::SGD target(std::move(source));
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  optim::fuse_(source);
  CHECK_NOTHROW(error_text<c10::Error>([&] { optim::fused_step(source); }));
  optim::unfuse_(source);
  // NOLINTEND(bugprone-use-after-move)
  CHECK(target.param_groups().size() == 1);
  CHECK(params[0].equal(at::ones({3})));
}
