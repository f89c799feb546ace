// SPDX-License-Identifier: Apache-2.0
// A program of a user of fastamp that serves a model that AOTInductor compiled: run_package FILE.
#include <fastamp/fastamp.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linspace.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iomanip>
#include <iostream>

int main(int count, char** arguments) {
  if (count != 2) {
    std::cout << "run_package: expected the path of a package, got " << count - 1 << " arguments\n";
    return 2;
  }
  const at::NoGradGuard no_grad;
  // What was compiled in float32 stays float32: a region does not reach into it.
  const fastamp::AutocastGuard region(c10::kCPU, c10::kBFloat16);
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const auto outputs = model.run({at::linspace(-1, 1, 8).reshape({2, 4})});
  const auto values = outputs.at(0).flatten();
  std::cout << std::setprecision(9);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    std::cout << values[i].item<float>() << ' ';
  }
  std::cout << '\n';
}
