// SPDX-License-Identifier: Apache-2.0
// Trains an MLP on handwritten digits in fp32, bf16, fp16 and fp8, with fastamp's scaler and fused
// SGD.
//
// python examples/data/digits.py digits.pt && digits digits.pt
#include "digits_report.h"

#include <fastamp/fastamp.h>

#include <torch/torch.h>

#include <algorithm>
#include <iostream>

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(64, 256));
    fc2 = register_module("fc2", torch::nn::Linear(256, 10));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = fc1->forward(x);
    seen = {x.scalar_type(), hidden.scalar_type(), fc1->weight.scalar_type()};
    return fc2->forward(torch::relu(hidden));
  }

  torch::nn::Linear fc1 = nullptr, fc2 = nullptr;
  digits::SeenDtypes seen;  // what a forward hook on fc1 would see; LibTorch has no such hooks
};
TORCH_MODULE(Mlp);

struct Mode {
  const char* name;
  torch::ScalarType dtype;
  bool float8 = false;  // linear layers run in fp8, and all else in the dtype
};

fastamp::AutocastGuard region_of(const Mode& mode, torch::Device device) {
  return mode.float8
             ? fastamp::AutocastGuard(device, fastamp::Float8Recipe().small_size(0, 0), mode.dtype)
             : fastamp::AutocastGuard(device, mode.dtype, mode.dtype != torch::kFloat);
}

void train(const digits::Data& data, torch::Device device, const Mode& mode,
           digits::Report& report) {
  Mlp model;
  digits::load_parameters(*model, data);
  model->to(device);
  fastamp::optim::SGD optimizer(model->parameters(), fastamp::optim::SGDOptions(/*lr=*/0.01));
  const bool scaled = mode.dtype == torch::kHalf;
  fastamp::GradScaler scaler(fastamp::GradScalerOptions()
                                 .device(device.type())
                                 .enabled(scaled)
                                 .history_size(report.iterations()));

  auto& row = report.add_row(mode.name, scaled);
  torch::Tensor loss;
  do {
    optimizer.zero_grad();
    {
      const auto region = region_of(mode, device);
      loss = torch::cross_entropy_loss(model->forward(data.x), data.y);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    row.record(loss);
  } while (row.goes_on());

  const torch::NoGradGuard no_grad;
  const auto region = region_of(mode, device);
  const auto right = model->forward(data.x).argmax(1) == data.y;
  const auto history = scaler.history();  // Read once: the device kept it during the run.
  const auto skipped = std::count_if(history.begin(), history.end(),
                                     [](const auto& iteration) { return iteration.skipped; });
  row.finish(model->seen, right.to(torch::kFloat).mean(), scaled ? scaler.get_scale() : 0.0,
             skipped);
}

int main(int argc, char** argv) try {
  const auto options = digits::parse_options(argc, argv);
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const auto data = digits::read_data(options.data, device);
  digits::Report report(options, device);
  for (const Mode& mode : {Mode{"fp32", torch::kFloat}, Mode{"bf16", torch::kBFloat16},
                           Mode{"fp16", torch::kHalf}, Mode{"fp8", torch::kBFloat16, true}}) {
    train(data, device, mode, report);
  }
  report.print();
} catch (const std::exception& error) {
  std::cerr << "digits: " << error.what() << '\n';
  return 1;
}
