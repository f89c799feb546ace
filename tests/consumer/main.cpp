// SPDX-License-Identifier: Apache-2.0
// A program of a user of fastamp: built against an installed fastamp and against its sources.
#include <fastamp/fastamp.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/serialize.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

namespace {

/// Two steps of linear regression in bfloat16. Returns whether they ran in mixed precision, through
/// fastamp's kernels, and made the loss smaller.
bool trains() {
  const auto x = at::ones({8, 4});
  const auto y = at::ones({8, 1});
  auto weight = at::zeros({1, 4}).requires_grad_();
  float losses[2];
  for (float& recorded : losses) {
    at::Tensor loss;
    {
      const fastamp::AutocastGuard region(c10::kCPU, c10::kBFloat16);
      const auto prediction = at::linear(x, weight);
      if (prediction.scalar_type() != c10::kBFloat16 || !fastamp::kernels_registered()) {
        return false;
      }
      loss = at::mse_loss(prediction, y);
    }
    loss.backward();
    const at::NoGradGuard no_grad;
    weight.sub_(weight.grad(), 0.05);
    weight.mutable_grad() = at::Tensor();
    recorded = loss.item<float>();
  }
  return losses[1] < losses[0] && weight.scalar_type() == c10::kFloat &&
         at::linear(x, weight).scalar_type() == c10::kFloat;
}

/// Reads the state_dict of a Python scaler, goes on for one clean step and one that overflows, and
/// writes a state for Python.
int carry_state(const char* from, const char* to) {
  std::ifstream file(from, std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  fastamp::GradScaler scaler(c10::kCPU);
  scaler.load_state(fastamp::GradScalerState::from_python(torch::pickle_load(bytes)));
  auto weight = at::ones({2}).requires_grad_();
  fastamp::optim::SGD optimizer({weight}, fastamp::optim::SGDOptions(0.5));
  for (const double gradient : {1.0, 1e300}) {
    optimizer.zero_grad();
    scaler.scale((weight * gradient).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  const auto state = scaler.state();
  std::cout << *state << '\n';
  const auto written = torch::pickle_save(state->to_python());
  std::ofstream(to, std::ios::binary)
      .write(written.data(), static_cast<std::streamsize>(written.size()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    return carry_state(argv[1], argv[2]);
  }
  if (!trains()) {
    std::cout << "two steps of training did not run in bfloat16 or did not learn\n";
    return 1;
  }
  const auto info = fastamp::build_info();
  std::cout << "fastamp " << info.version << ", torch " << info.torch_version << '\n';
  return info.version == FASTAMP_VERSION && !info.torch_version.empty() ? 0 : 1;
}
