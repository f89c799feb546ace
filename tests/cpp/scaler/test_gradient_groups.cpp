// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "scaler/gradient_groups.h"
#include "scaler/gradient_pass.h"
#include "scaler/scale_ops.h"
#include "support/catch.h"

#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <limits>
#include <vector>

using fastamp::scaler::GradientGroups;
using fastamp::scaler::PassResult;
using fastamp::scaler::Purpose;

namespace {

at::Tensor parameter_of(const at::Tensor& gradient) {
  auto parameter = at::zeros(gradient.sizes(), gradient.scalar_type()).requires_grad_(true);
  parameter.mutable_grad() = gradient;
  return parameter;
}

float unscale(GradientGroups& groups, float inv_scale) {
  const PassResult pass =
      fastamp::scaler::unscale(groups.release(), at::full({}, inv_scale), at::zeros({}), {});
  REQUIRE(pass.devices().size() == 1);
  CHECK(pass.devices()[0].seen.device.is_cpu());
  return pass.devices()[0].found_inf.item<float>();
}

at::Tensor duplicates(float value, at::ScalarType dtype) {
  return at::sparse_coo_tensor(at::zeros({1, 2}, at::kLong), at::full({2}, value, dtype), {4});
}

}  // namespace

TEST_CASE("groups: gradients of every dtype and size share one flag", "[scaler]") {
  GradientGroups groups(Purpose::kMultiply);
  std::vector<at::Tensor> parameters;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t size : {0, 1, 17}) {
      parameters.push_back(parameter_of(at::full({size}, 4.0, dtype)));
      groups.add_all(parameters.back());
    }
  }
  CHECK(unscale(groups, 0.5F) == 0.0F);
  for (const auto& parameter : parameters) {
    CHECK(parameter.grad().eq(2.0).all().item<bool>());
  }
}

TEST_CASE("groups: an undefined gradient is passed over", "[scaler]") {
  GradientGroups groups(Purpose::kUnscale);
  groups.add_all(at::zeros({2}).requires_grad_(true));
  CHECK(groups.release().empty());
}

TEST_CASE("groups: sparse fp16 duplicates are summed before the check", "[scaler]") {
  GradientGroups groups(Purpose::kMultiply);
  auto parameter = parameter_of(duplicates(60000.0F, at::kHalf));
  groups.add_all(parameter);
  CHECK(unscale(groups, 0.5F) == 1.0F);
  CHECK(parameter.grad().is_coalesced());
}

TEST_CASE("groups: sparse fp32 gradients are unscaled where they are", "[scaler]") {
  GradientGroups groups(Purpose::kUnscale);
  const auto gradient = duplicates(4.0F, at::kFloat);
  auto parameter = parameter_of(gradient);
  groups.add_all(parameter);
  CHECK(unscale(groups, 0.5F) == 0.0F);
  CHECK(parameter.grad().is_same(gradient));
  CHECK(gradient._values().eq(2.0).all().item<bool>());
}

TEST_CASE("groups: a refused fp16 gradient changes no other", "[scaler]") {
  GradientGroups groups(Purpose::kUnscale);
  auto first = parameter_of(at::full({2}, 4.0));
  groups.add_all(first);
  CHECK_THROWS_AS(groups.add_all(parameter_of(at::ones({2}, at::kHalf))), c10::ValueError);
  CHECK(first.grad().eq(4.0).all().item<bool>());
}

TEST_CASE("groups: fp16 is refused after fp32 of the same device too", "[scaler]") {
  // The short path compares with the gradient before: the dtype must be part of that.
  GradientGroups groups(Purpose::kUnscale);
  groups.add_all(parameter_of(at::ones({2})));
  groups.add_all(parameter_of(at::ones({2})));
  CHECK_THROWS_AS(groups.add_all(parameter_of(at::ones({2}, at::kHalf))), c10::ValueError);
}

TEST_CASE("groups: a pass that asks for them gets the addresses of dense gradients", "[scaler]") {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < 70; ++i) {
    const auto dtype = i % 9 == 0 ? at::kBFloat16 : at::kFloat;
    parameters.push_back(parameter_of(at::ones({2, i % 5}, dtype).t()));
  }
  parameters[3].mutable_grad() = at::Tensor();
  parameters[40].mutable_grad() = at::ones({30}).narrow(0, 7, 2);
  GradientGroups groups(Purpose::kCheck);
  REQUIRE(groups.add_all(parameters));
  const auto found = groups.release();
  REQUIRE(found.size() == 1);
  const auto& gradients = found[0].gradients;
  const auto& arrays = found[0].arrays;
  REQUIRE(gradients.size() == 69);
  REQUIRE(arrays.size() == 69);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    CHECK(arrays[i].data == gradients[i].const_data_ptr());
    CHECK(arrays[i].numel == gradients[i].numel());
    CHECK(arrays[i].dtype == gradients[i].scalar_type());
  }
}

TEST_CASE("groups: one gradient that is no array takes the addresses of all", "[scaler]") {
  const std::vector<at::Tensor> odd{at::ones({4, 4}).narrow(1, 0, 2),
                                    at::ones({2}).mul(1).to(at::kDouble).expand({3, 2}),
                                    at::_neg_view(at::ones({2}))};
  for (const auto& gradient : odd) {
    for (const std::size_t place : {0U, 20U, 50U}) {
      std::vector<at::Tensor> parameters(place, parameter_of(at::ones({2})));
      parameters.push_back(parameter_of(gradient));
      parameters.push_back(parameter_of(at::ones({2})));
      GradientGroups groups(Purpose::kCheck);
      REQUIRE(groups.add_all(parameters));
      CHECK(groups.release().at(0).arrays.empty());
    }
  }
}

TEST_CASE("groups: addresses are kept neither unasked nor after code of others", "[scaler]") {
  const auto parameter = parameter_of(at::ones({2}));
  GradientGroups unasked(Purpose::kMultiply);
  unasked.add_all(parameter);
  CHECK(unasked.release().at(0).arrays.empty());
  GradientGroups forgetful(Purpose::kCheck);
  forgetful.add_all(parameter);
  forgetful.give_up_addresses();
  forgetful.add_all(parameter);
  CHECK(forgetful.release().at(0).arrays.empty());
}

TEST_CASE("inverse_scale: one rounding from fp64", "[scaler]") {
  for (const float scale : {3.0F, 65536.0F, 1e-30F, 0.1F, 3.4e38F}) {
    const auto inverse = fastamp::scaler::inverse_scale(at::full({}, scale));
    CHECK(inverse.item<float>() == static_cast<float>(1.0 / static_cast<double>(scale)));
  }
  CHECK(fastamp::scaler::inverse_scale(at::zeros({})).item<float>() ==
        std::numeric_limits<float>::infinity());
}

TEST_CASE("combine_flags: any raised flag counts, and none is written", "[scaler]") {
  using fastamp::scaler::combine_flags;
  const auto zero = at::zeros({});
  const auto minus = at::full({1}, -1.0);
  const auto one = at::ones({});
  CHECK(combine_flags({zero, zero}, at::kCPU).item<float>() == 0.0F);
  CHECK(combine_flags({zero, one, minus}, at::kCPU).item<float>() == 1.0F);
  CHECK(zero.item<float>() == 0.0F);
  CHECK(combine_flags({one}, at::kCPU).is_same(one));
  CHECK(fastamp::scaler::binary_flag({at::full({1}, 2.0)}, at::kCPU).item<float>() == 1.0F);
}
