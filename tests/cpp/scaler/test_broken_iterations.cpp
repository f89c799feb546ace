// SPDX-License-Identifier: Apache-2.0
// Iterations that were broken off between unscale_() and update(), and programs that look alike.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;

namespace {

struct Job {
  explicit Job(bool fused, GradScaler& with) : scaler(with) {
    if (fused) {
      optimizer = std::make_unique<fastamp::optim::SGD>(parameters, fastamp::optim::SGDOptions(1));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1));
    }
  }

  void backward(std::size_t count = 3) {
    auto loss = parameters[0].sum();
    for (std::size_t i = 1; i < count; ++i) {
      loss = loss + parameters[i].sum();
    }
    scaler.scale(loss).backward();
  }
  double value(std::size_t i) const { return parameters[i].detach()[0].item<double>(); }

  GradScaler& scaler;
  std::vector<at::Tensor> parameters{at::ones({2}).requires_grad_(true),
                                     at::ones({2}).requires_grad_(true),
                                     at::ones({2}).requires_grad_(true)};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

bool refuses(const std::function<void()>& call, const std::string& function) {
  return message_of(call).find(function + ": expected the gradients that unscale_() has divided") !=
         std::string::npos;
}

}  // namespace

TEST_CASE("step: gradients of a new backward are refused where others were unscaled", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(100.0));
  Job job(GENERATE(false, true), scaler);
  job.backward();
  scaler.unscale_(*job.optimizer);
  job.optimizer->zero_grad();
  job.backward();
  for (int i = 0; i < 2; ++i) {
    CHECK(refuses([&] { scaler.step(*job.optimizer); }, "step"));
    CHECK(refuses([&] { scaler.clip_grad_norm_(*job.optimizer, 1.0); }, "clip_grad_norm_"));
    CHECK(refuses([&] { scaler.clip_grad_value_(*job.optimizer, 1.0); }, "clip_grad_value_"));
    CHECK(job.value(0) == 1.0);
    CHECK(job.parameters[0].grad()[0].item<float>() == 100.0F);
  }
  scaler.update();  // The way out.
  scaler.step(*job.optimizer);
  scaler.update();
  CHECK(job.value(0) == 0.0);
  CHECK(scaler.history().size() == 2);
}

TEST_CASE("step: a sparse gradient of a new backward is refused, one that was seen is not",
          "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto table = at::ones({4}).requires_grad_(true);
  const auto gradient = [] {
    return at::sparse_coo_tensor(at::ones({1, 1}, at::kLong), at::tensor({8.0F}), {4});
  };
  table.mutable_grad() = gradient();
  auto optimizer = sgd({table});
  scaler.unscale_(optimizer);
  scaler.scale(at::ones({}));
  const auto seen = table.grad();
  table.mutable_grad() = gradient();
  CHECK(refuses([&] { scaler.step(optimizer); }, "step"));
  table.mutable_grad() = seen;
  scaler.step(optimizer);
  CHECK(table[1].item<float>() == -1.0F);
}

TEST_CASE("step: what may be meant is stepped", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(4.0));
  Job job(GENERATE(false, true), scaler);
  auto& parameters = job.parameters;
  job.backward();
  scaler.unscale_(*job.optimizer);
  SECTION("replaced, and no loss was scaled") {
    for (auto& parameter : parameters) {
      parameter.mutable_grad() = parameter.grad() * 0.5;
    }
    scaler.step(*job.optimizer);
    CHECK(job.value(0) == 0.5);
  }
  SECTION("edited in place after another loss was scaled") {
    scaler.scale(at::ones({}));
    for (auto& parameter : parameters) {
      parameter.grad().mul_(0.5);
    }
    scaler.step(*job.optimizer);
    CHECK(job.value(0) == 0.5);
  }
  SECTION("some dropped, some new") {
    parameters[0].mutable_grad() = at::Tensor();
    parameters[1].mutable_grad() = at::Tensor();
    job.backward(1);
    scaler.step(*job.optimizer);
    CHECK(job.value(0) == -3.0);
    CHECK(job.value(1) == 1.0);
    CHECK(job.value(2) == 0.0);
  }
  SECTION("all dropped") {
    job.optimizer->zero_grad();
    scaler.scale(at::ones({}));
    scaler.step(*job.optimizer);
    CHECK(job.value(0) == 1.0);
  }
}

TEST_CASE("two optimizers whose calls are interleaved are stepped", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(4.0));
  const bool fused = GENERATE(false, true);
  Job first(fused, scaler);
  Job second(fused, scaler);
  for (int i = 0; i < 3; ++i) {
    for (auto* job : {&first, &second}) {
      job->optimizer->zero_grad();
      job->backward();
      scaler.unscale_(*job->optimizer);
    }
    scaler.step(*first.optimizer);
    scaler.step(*second.optimizer);
    scaler.update();
  }
  CHECK(first.value(0) == -2.0);
  CHECK(second.value(2) == -2.0);
}

TEST_CASE("options.fuse: an optimizer where a fused one was is fused too", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0).fuse(true));
  const bool same_parameters = GENERATE(true, false);
  auto parameter = parameter_with(4.0F);
  std::optional<torch::optim::SGD> optimizer;
  for (int i = 0; i < 3; ++i) {
    optimizer.emplace(std::vector<at::Tensor>{parameter}, torch::optim::SGDOptions(1.0));
    CHECK_FALSE(fastamp::optim::is_fused(*optimizer));
    scaler.step(*optimizer);
    scaler.update();
    CHECK(fastamp::optim::is_fused(*optimizer));
    parameter = same_parameters ? parameter : parameter_with(4.0F);
    parameter.mutable_grad() = at::full({2}, 4.0F);
  }
}
