// SPDX-License-Identifier: Apache-2.0
// Trains a small convolutional network on handwritten digits in float16 or bfloat16.
//
//   python examples/data/digits.py digits.pt && cnn digits.pt [fp16|bf16] [STEPS]
#include <fastamp/fastamp.h>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace nn = torch::nn;

namespace {

struct Data {
  torch::Tensor images;  // float32 (1797, 1, 8, 8)
  torch::Tensor labels;  // int64 (1797)
};

/// Reads a dictionary of tensors that Python's torch.save wrote.
Data read_data(const std::string& path, torch::Device device) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, "; examples/data/digits.py writes it");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto content = torch::pickle_load(bytes).toGenericDict();
  return {content.at("x").toTensor().view({-1, 1, 8, 8}).to(device),
          content.at("y").toTensor().to(device)};
}

nn::Sequential make_model() {
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(1, 32, 3).padding(1)), nn::BatchNorm2d(32),
                       nn::ReLU(), nn::MaxPool2d(2),
                       nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1)), nn::BatchNorm2d(64),
                       nn::ReLU(), nn::Flatten(), nn::Linear(64 * 4 * 4, 10));
  return model;
}

double accuracy(nn::Sequential& model, const Data& data, torch::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  const fastamp::AutocastGuard region(data.images.device(), dtype);
  model->eval();
  const auto right = model->forward(data.images).argmax(1) == data.labels;
  return right.to(torch::kFloat).mean().item<double>();
}

void train(const std::string& path, torch::ScalarType dtype, int steps) {
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  torch::manual_seed(0);
  const auto data = read_data(path, device);
  auto model = make_model();
  model->to(device);
  fastamp::optim::AdamW optimizer(model->parameters(), fastamp::optim::AdamWOptions(1e-3));
  // The host never waits for the device: an overflow skips the step there.
  fastamp::GradScaler scaler(
      fastamp::GradScalerOptions().device(device.type()).enabled(dtype == torch::kHalf));

  for (int step = 1; step <= steps; ++step) {
    const auto chosen = torch::randint(data.labels.size(0), {64}, data.labels.options());
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const fastamp::AutocastGuard region(device, dtype);
      const auto scores = model->forward(data.images.index_select(0, chosen));
      loss = torch::cross_entropy_loss(scores, data.labels.index_select(0, chosen));
    }
    scaler.scale(loss).backward();
    scaler.clip_grad_norm_(optimizer, 1.0);
    scaler.step(optimizer);
    scaler.update();
    if (step % 50 == 0 || step == steps) {
      std::cout << "step " << step << ": loss " << loss.item<double>() << '\n';
    }
  }
  std::cout << c10::toString(dtype) << ": accuracy " << 100 * accuracy(model, data, dtype)
            << " %\n";
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc >= 2, "usage: cnn DATA [fp16|bf16] [STEPS]");
  const std::string mode = argc > 2 ? argv[2] : "bf16";
  TORCH_CHECK(mode == "fp16" || mode == "bf16", "expected fp16 or bf16, got ", mode);
  train(argv[1], mode == "fp16" ? torch::kHalf : torch::kBFloat16,
        argc > 3 ? std::stoi(argv[3]) : 200);
} catch (const std::exception& error) {
  std::cerr << "cnn: " << error.what() << '\n';
  return 1;
}
