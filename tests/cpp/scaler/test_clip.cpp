// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/scaler/clip.h>

#include <ATen/ops/complex.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::clip_grad_norm_;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor with_gradient(const at::Tensor& gradient) {
  auto parameter = at::zeros(gradient.sizes(), gradient.options()).requires_grad_(true);
  parameter.mutable_grad() = gradient.clone();
  return parameter;
}

}  // namespace

TEST_CASE("clip_grad_norm_ function: as LibTorch's, of any order", "[scaler]") {
  const double norm_type = GENERATE(2.0, 1.0, 0.5, kInfinity);
  const double max_norm = GENERATE(0.5, 1e9);
  const auto dtype = GENERATE(at::kFloat, at::kDouble);
  auto params = make_params(dtype);
  params.erase(params.begin() + 3);  // LibTorch's infinity norm takes no empty gradient.
  auto reference = copy_of(params);
  set_gradients({&params, &reference});
  const double expected = torch::nn::utils::clip_grad_norm_(reference, max_norm, norm_type);
  const auto norm = clip_grad_norm_(params, max_norm, norm_type);
  CHECK(norm.scalar_type() == dtype);
  CHECK(norm.dim() == 0);
  CHECK(norm.item<double>() == Approx(expected).epsilon(1e-5));
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i].grad().defined()) {
      CHECK(params[i].grad().allclose(reference[i].grad(), 1e-5, 1e-8));
    }
  }
}

TEST_CASE("clip_grad_norm_ function: the norm has the promoted dtype of the gradients",
          "[scaler]") {
  const auto half = with_gradient(at::full({3}, 2.0, at::kHalf));
  const auto brain = with_gradient(at::full({3}, 2.0, at::kBFloat16));
  const auto single = with_gradient(at::full({3}, 2.0));
  CHECK(clip_grad_norm_({half}, 1e9).scalar_type() == at::kHalf);
  CHECK(clip_grad_norm_({half, brain}, 1e9).scalar_type() == at::kFloat);
  CHECK(clip_grad_norm_({brain, single}, 1e9).scalar_type() == at::kFloat);
  CHECK(clip_grad_norm_({half, brain}, 1e9, 1.0).scalar_type() == at::kFloat);
  CHECK(clip_grad_norm_({half, brain}, 1e9).item<float>() == std::sqrt(24.0F));
}

TEST_CASE("clip_grad_norm_ function: one tensor, none, and gradients that need no scaling",
          "[scaler]") {
  const auto one = with_gradient(at::tensor({3.0F, 4.0F}));
  const auto version = one.grad()._version();
  CHECK(clip_grad_norm_(one, 5.1).item<float>() == 5.0F);
  CHECK(one.grad().equal(at::tensor({3.0F, 4.0F})));
  CHECK(clip_grad_norm_(one, 2.5).item<float>() == 5.0F);
  CHECK(one.grad().allclose(at::tensor({1.5F, 2.0F})));
  CHECK(one.grad()._version() > version);
  CHECK(clip_grad_norm_({}, 1.0).item<float>() == 0.0F);
  CHECK(clip_grad_norm_({at::ones({2}).requires_grad_(true)}, 1.0).item<float>() == 0.0F);
}

TEST_CASE("clip_grad_norm_ function: a parameter that is listed twice counts once", "[scaler]") {
  const auto tied = with_gradient(at::tensor({3.0F, 4.0F}));
  const auto other = with_gradient(at::tensor({12.0F}));
  auto sharing = at::zeros({2}).requires_grad_(true);
  sharing.mutable_grad() = tied.grad();
  CHECK(clip_grad_norm_({tied, other, tied, sharing}, 6.5).item<float>() == 13.0F);
  CHECK(tied.grad().allclose(at::tensor({1.5F, 2.0F})));
  CHECK(other.grad().allclose(at::tensor({6.0F})));
}

TEST_CASE("clip_grad_norm_ function: sparse and complex gradients", "[scaler]") {
  auto embedding = at::zeros({3, 2}).requires_grad_(true);
  // Twice row 1: the sum is 3 and 4.
  embedding.mutable_grad() =
      at::sparse_coo_tensor(at::tensor({1, 1}, at::kLong).reshape({1, 2}),
                            at::tensor({1.0F, 4.0F, 2.0F, 0.0F}).reshape({2, 2}), {3, 2});
  CHECK(clip_grad_norm_(embedding, 2.5).item<float>() == 5.0F);
  CHECK(embedding.grad().to_dense()[1].allclose(at::tensor({1.5F, 2.0F})));
  const auto complex = with_gradient(at::complex(at::tensor({3.0F}), at::tensor({4.0F})));
  CHECK(clip_grad_norm_(complex, 2.5).item<float>() == 5.0F);
  CHECK(at::linalg_vector_norm(complex.grad()).item<float>() == Approx(2.5).epsilon(1e-5));
}

TEST_CASE("clip_grad_norm_ function: a norm that is not finite is refused if asked for",
          "[scaler]") {
  const auto bad = with_gradient(at::tensor({1.0F, static_cast<float>(kInfinity)}));
  CHECK(error_text<c10::Error>([&] { clip_grad_norm_(bad, 1.0, 2.0, true); })
            .find("clip_grad_norm_: expected finite gradients, got a norm of "
                  "inf") == 0);
  CHECK(bad.grad()[0].item<float>() == 1.0F);
  CHECK(std::isinf(clip_grad_norm_(bad, 1.0).item<float>()));
  CHECK(bad.grad()[0].item<float>() == 0.0F);
}
