// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "scaler/gradient_factors.h"
#include "scaler/gradient_pass.h"
#include "scaler/readback.h"
#include "support/catch.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <optional>

using fastamp::scaler::check;
using fastamp::scaler::DeviceGradients;
using fastamp::scaler::FlagUse;
using fastamp::scaler::PassBuffers;
using fastamp::scaler::PassResult;
using fastamp::scaler::unscale;

namespace {

const double kInfinity = std::numeric_limits<double>::infinity();

std::vector<DeviceGradients> gradients_of(const std::vector<at::Tensor>& tensors) {
  DeviceGradients group{.device = c10::kCPU, .gradients = tensors, .positions = {}, .arrays = {}};
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    group.positions.push_back(i);
  }
  return {group};
}

}  // namespace

TEST_CASE("pass: unscaling knows the norm of what it leaves", "[scaler]") {
  const auto gradient = at::full({4}, 8.0F);
  const PassResult pass = unscale(gradients_of({gradient}), at::full({}, 0.25F), at::zeros({}), {});
  CHECK(gradient[0].item<float>() == 2.0F);
  REQUIRE(pass.has_norm());
  CHECK(pass.total_norm(at::kFloat).item<float>() == 4.0F);
  CHECK(pass.devices()[0].found_inf.item<float>() == 0.0F);
}

TEST_CASE("pass: a read-only pass leaves gradients alone and computes the factor", "[scaler]") {
  const auto gradient = at::full({4}, 8.0F);
  const PassResult pass =
      check(gradients_of({gradient}), at::full({}, 0.25F), at::zeros({}), {}, 1.0);
  CHECK(gradient[0].item<float>() == 8.0F);
  const auto norm = pass.total_norm(at::kFloat);
  CHECK(norm.item<float>() == 4.0F);
  CHECK(pass.devices()[0].clip_coef.item<float>() ==
        fastamp::scaler::clip_coefficient(norm, 1.0).item<float>());
}

TEST_CASE("pass: holds exactly its gradients, in any order, until they are changed", "[scaler]") {
  const auto first = at::full({2}, 1.0F);
  const auto second = at::full({3}, 1.0F);
  PassResult pass = unscale(gradients_of({first, second}), at::full({}, 1.0F), at::zeros({}), {});
  CHECK(pass.holds(gradients_of({first, second})));
  CHECK(pass.holds(gradients_of({second, first})));
  CHECK(pass.lists(gradients_of({first, second})));
  CHECK_FALSE(pass.lists(gradients_of({second, first})));
  CHECK_FALSE(pass.lists(gradients_of({first})));
  CHECK_FALSE(pass.holds(gradients_of({first})));
  CHECK_FALSE(pass.holds(gradients_of({first, first})));
  CHECK_FALSE(pass.holds(gradients_of({first, second.clone()})));
  first.add_(1.0F);
  CHECK_FALSE(pass.holds(gradients_of({first, second})));
  CHECK_FALSE(pass.lists(gradients_of({first, second})));
}

TEST_CASE("pass: holds gradients that are views of one buffer and share its version", "[scaler]") {
  const auto buffer = at::full({4}, 1.0F);
  const auto first = buffer.narrow(0, 0, 2);
  const auto second = buffer.narrow(0, 2, 2);
  const auto before = buffer._version();
  const PassResult pass =
      unscale(gradients_of({first, second}), at::full({}, 1.0F), at::zeros({}), {});
  CHECK(buffer._version() > before);
  CHECK(pass.holds(gradients_of({first, second})));
  buffer.add_(1.0F);
  CHECK_FALSE(pass.holds(gradients_of({first, second})));
}

TEST_CASE("pass: a pass that throws bumps no version", "[scaler]") {
  const auto gradient = at::full({2}, 1.0F);
  const auto before = gradient._version();
  CHECK_THROWS(unscale(gradients_of({gradient, at::full({1}, 1.0F).expand({3})}),
                       at::full({}, 0.5F), at::zeros({}), {}));
  CHECK(gradient._version() == before);
  CHECK(gradient[0].item<float>() == 1.0F);
}

TEST_CASE("pass: what was forgotten is not held, and is free", "[scaler]") {
  const auto gradient = at::full({2}, 1.0F);
  PassResult pass = unscale(gradients_of({gradient}), at::full({}, 1.0F), at::zeros({}), {});
  CHECK(gradient.use_count() == 2);
  pass.forget();
  CHECK(gradient.use_count() == 1);
  CHECK_FALSE(pass.holds(gradients_of({gradient})));
  CHECK(pass.total_norm(at::kFloat).item<float>() == std::sqrt(2.0F));
}

TEST_CASE("pass: several passes make up a list together", "[scaler]") {
  const auto first = at::full({1}, 3.0F);
  const auto second = at::full({1}, 4.0F);
  const auto one = at::full({}, 1.0F);
  const PassResult a = unscale(gradients_of({first}), one, at::zeros({}), {});
  const PassResult b = unscale(gradients_of({second}), one, at::zeros({}), {});
  const auto norm =
      fastamp::scaler::norm_of_passes({&a, &b}, gradients_of({second, first}), at::kFloat);
  REQUIRE(norm.has_value());
  CHECK(norm->item<float>() == 5.0F);
  CHECK_FALSE(fastamp::scaler::norm_of_passes({&a}, gradients_of({first, second}), at::kFloat));
}

TEST_CASE("pass buffers: counters stay with their gradients and show the last overflow",
          "[scaler]") {
  PassBuffers buffers;
  const auto one = at::full({}, 1.0F);
  const auto bad = at::full({2}, kInfinity);
  const auto good = at::full({2}, 1.0F);
  const PassResult overflow =
      check(gradients_of({good, bad}), one, at::zeros({}), {.buffers = &buffers});
  const PassResult clean =
      check(gradients_of({good, good.clone()}), one, at::zeros({}), {.buffers = &buffers});
  const auto& counts = overflow.devices()[0].counts;
  CHECK(clean.devices()[0].counts == counts);
  CHECK(counts->counts[0][0].item<int64_t>() == 0);
  CHECK(counts->counts[1][0].item<int64_t>() == 2);
  CHECK(counts->counts[1][1].item<int64_t>() == 0);
  const PassResult fewer = check(gradients_of({good}), one, at::zeros({}), {.buffers = &buffers});
  CHECK(fewer.devices()[0].counts != counts);
  CHECK(counts->counts[1][0].item<int64_t>() == 2);
}

TEST_CASE("pass: tensors that it writes move by one version, with and without addresses",
          "[scaler]") {
  const bool by_address = GENERATE(false, true);
  PassBuffers buffers;
  const auto parameter = at::ones({2});
  parameter.mutable_grad() = at::full({2}, 3.0F);
  fastamp::scaler::GradientGroups groups(fastamp::scaler::Purpose::kCheck);
  groups.add_all({parameter});
  if (!by_address) {
    groups.give_up_addresses();
  }
  auto gradients = groups.release();
  REQUIRE(gradients[0].arrays.empty() != by_address);
  const auto flag = at::zeros({});
  const auto before = buffers.counts_for(c10::kCPU, {0})->counts._version();
  const auto flag_before = flag._version();
  const auto gradient_before = parameter.grad()._version();
  const PassResult pass = check(std::move(gradients), at::full({}, 1.0F), flag,
                                {.flag = FlagUse::kRaise, .buffers = &buffers}, 1.0);
  const auto& result = pass.devices()[0];
  CHECK(flag._version() == flag_before + 1);
  CHECK(result.clip_coef._version() == 1);
  CHECK(result.total_norm._version() == 1);
  CHECK(result.sum_of_squares._version() == 1);
  CHECK(result.counts->counts._version() == before + 1);
  CHECK(parameter.grad()._version() == gradient_before);
}

TEST_CASE("readback: host values arrive at once and do not follow their source", "[scaler]") {
  const auto scale = at::full({}, 8.0F);
  fastamp::scaler::Readback readback({scale, at::zeros({})});
  readback.start();
  scale.fill_(1.0F);
  CHECK(readback.ready());
  CHECK(readback.values() == std::vector<double>{8.0, 0.0});
}

TEST_CASE("pass: a flag is copied, raised or overwritten, as asked", "[scaler]") {
  const auto one = at::ones({});
  for (const bool bad : {false, true}) {
    const auto gradients = [&] {
      return gradients_of({at::full({3}, bad ? static_cast<float>(kInfinity) : 1.0F)});
    };
    for (const bool reads : {false, true}) {
      const auto flag_after = [&](float before, FlagUse use) {
        const auto flag = at::full({}, before);
        const auto pass = reads ? check(gradients(), one, flag, {.flag = use})
                                : unscale(gradients(), one, flag, {.flag = use});
        const float found = pass.devices()[0].found_inf.item<float>();
        CHECK(pass.devices()[0].found_inf.is_same(flag) == (use != FlagUse::kCopy));
        if (use == FlagUse::kCopy) {
          CHECK(flag.item<float>() == before);
        }
        return found;
      };
      CAPTURE(bad, reads);
      for (const auto use : {FlagUse::kCopy, FlagUse::kRaise}) {
        CHECK(flag_after(0.0F, use) == (bad ? 1.0F : 0.0F));
        CHECK(flag_after(1.0F, use) == 1.0F);
      }
      CHECK(flag_after(7.0F, FlagUse::kOverwrite) == (bad ? 1.0F : 0.0F));
    }
  }
}
