// SPDX-License-Identifier: Apache-2.0
// A generative adversarial network on 8x8 digits: two optimizers, one scaler.
//
//   python examples/data/digits.py digits.pt && dcgan digits.pt [fp16|bf16] [STEPS]
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

constexpr int kNoise = 32, kBatch = 64;

torch::Tensor read_images(const std::string& path, torch::Device device) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, "; examples/data/digits.py writes it");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto pixels = torch::pickle_load(bytes).toGenericDict().at("x").toTensor();
  return (2 * pixels - 1).view({-1, 1, 8, 8}).to(device);  // -1 to 1, as tanh gives them
}

nn::Sequential make_generator() {
  nn::Sequential generator(
      nn::ConvTranspose2d(nn::ConvTranspose2dOptions(kNoise, 64, 4).bias(false)),
      nn::BatchNorm2d(64), nn::ReLU(),
      nn::ConvTranspose2d(nn::ConvTranspose2dOptions(64, 1, 4).stride(2).padding(1)), nn::Tanh());
  return generator;
}

nn::Sequential make_critic() {
  const auto leaky = nn::LeakyReLUOptions().negative_slope(0.2);
  nn::Sequential critic(nn::Conv2d(nn::Conv2dOptions(1, 32, 4).stride(2).padding(1)),
                        nn::LeakyReLU(leaky), nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1)),
                        nn::LeakyReLU(leaky), nn::Flatten(), nn::Linear(64 * 4 * 4, 1));
  return critic;
}

/// The loss of images that are to pass for real (target 1) or for made (target 0). With logits:
/// binary_cross_entropy on probabilities is refused in regions, because float16 cannot hold them.
torch::Tensor verdict(nn::Sequential& critic, const torch::Tensor& images, double target) {
  const auto logits = critic->forward(images).flatten();
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, target));
}

void print_digit(nn::Sequential& generator, torch::Device device, torch::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  const fastamp::AutocastGuard region(device, dtype);
  generator->eval();
  const auto digit = generator->forward(torch::randn({1, kNoise, 1, 1}, device)).to(torch::kFloat);
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) {
      const auto shade = (digit[0][0][row][column].item<double>() + 1) / 2;  // 0 to 1
      std::cout << " .:-=+*#@"[static_cast<int>(shade * 8)] << ' ';
    }
    std::cout << '\n';
  }
}

void train(const std::string& path, torch::ScalarType dtype, int steps) {
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  torch::manual_seed(0);
  const auto images = read_images(path, device);
  auto generator = make_generator();
  auto critic = make_critic();
  generator->to(device);
  critic->to(device);
  const auto options = fastamp::optim::AdamWOptions(2e-4).betas({0.5, 0.999}).weight_decay(0);
  fastamp::optim::AdamW generator_step(generator->parameters(), options);
  fastamp::optim::AdamW critic_step(critic->parameters(), options);
  fastamp::GradScaler scaler(
      fastamp::GradScalerOptions().device(device.type()).enabled(dtype == torch::kHalf));

  for (int step = 1; step <= steps; ++step) {
    const auto chosen =
        torch::randint(images.size(0), {kBatch}, torch::device(device).dtype(torch::kLong));
    const auto real = images.index_select(0, chosen);
    const auto noise = torch::randn({kBatch, kNoise, 1, 1}, device);

    critic_step.zero_grad();
    torch::Tensor made;
    torch::Tensor critic_loss;
    {
      const fastamp::AutocastGuard region(device, dtype);
      made = generator->forward(noise);
      critic_loss = verdict(critic, real, 1.0) + verdict(critic, made.detach(), 0.0);
    }
    scaler.scale(critic_loss).backward();
    scaler.step(critic_step);

    generator_step.zero_grad();
    torch::Tensor generator_loss;
    {
      const fastamp::AutocastGuard region(device, dtype);
      generator_loss = verdict(critic, made, 1.0);
    }
    scaler.scale(generator_loss).backward();
    scaler.step(generator_step);  // each optimizer skips for its own overflows

    scaler.update();  // once, after all optimizers
    if (step % 50 == 0 || step == steps) {
      std::cout << "step " << step << ": critic " << critic_loss.item<double>() << ", generator "
                << generator_loss.item<double>() << '\n';
    }
  }
  print_digit(generator, device, dtype);
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc >= 2, "usage: dcgan DATA [fp16|bf16] [STEPS]");
  const std::string mode = argc > 2 ? argv[2] : "bf16";
  TORCH_CHECK(mode == "fp16" || mode == "bf16", "expected fp16 or bf16, got ", mode);
  train(argv[1], mode == "fp16" ? torch::kHalf : torch::kBFloat16,
        argc > 3 ? std::stoi(argv[3]) : 300);
} catch (const std::exception& error) {
  std::cerr << "dcgan: " << error.what() << '\n';
  return 1;
}
