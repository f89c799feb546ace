// SPDX-License-Identifier: Apache-2.0
// What examples/c/digits.c does, in C++: prints the same lines, bit for bit.
#include <fastamp/fastamp.h>

#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <vector>

namespace {

constexpr int kIterations = 30;

torch::Tensor read(std::ifstream& file, std::vector<std::int64_t> sizes, torch::Dtype dtype) {
  auto tensor = torch::empty(sizes, dtype);
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  return tensor;
}

std::uint64_t hash_of(const torch::Tensor& tensor) {
  std::uint64_t hash = 1469598103934665603U;
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
    hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    return 1;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const auto rows = read(file, {1}, torch::kLong).item<std::int64_t>();
  const auto x = read(file, {rows, 64}, torch::kFloat);
  const auto y = read(file, {rows}, torch::kLong);
  const std::vector<torch::Tensor> initial = {read(file, {256, 64}, torch::kFloat),
                                              read(file, {10, 256}, torch::kFloat)};
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const std::vector<torch::Tensor> weights = {initial[0].clone().requires_grad_(),
                                                initial[1].clone().requires_grad_()};
    fastamp::optim::SGD optimizer(weights, fastamp::optim::SGDOptions(0.1).momentum(0.9));
    fastamp::GradScaler scaler(
        fastamp::GradScalerOptions().device(torch::kCPU).enabled(dtype == torch::kHalf));
    float begun = 0;
    float last = 0;
    for (int i = 0; i < kIterations; ++i) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const fastamp::AutocastGuard region(torch::kCPU, dtype, dtype != torch::kFloat);
        const auto hidden = torch::relu(torch::linear(x, weights[0]));
        loss = torch::cross_entropy_loss(torch::linear(hidden, weights[1]), y);
      }
      scaler.scale(loss).backward();
      last = loss.item<float>();
      begun = i == 0 ? last : begun;
      scaler.clip_grad_norm_(optimizer, 1.0);
      scaler.step(optimizer);
      scaler.update();
    }
    const char* const name = dtype == torch::kFloat      ? "float32"
                             : dtype == torch::kBFloat16 ? "bfloat16"
                                                         : "float16";
    std::printf("%s: loss %a -> %a, weights %016llx %016llx\n", name, begun, last,
                static_cast<unsigned long long>(hash_of(weights[0])),
                static_cast<unsigned long long>(hash_of(weights[1])));
  }
}
