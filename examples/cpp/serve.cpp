// SPDX-License-Identifier: Apache-2.0
// Two ways to run a model of mixed precision without Python.
//
//   serve PACKAGE.pt2 SCRIPT.pt INPUT.pt OUTPUT.pt
//
// PACKAGE.pt2 was made by
// fastamp.inference.export(model, (x,), torch.bfloat16, format="aoti", ...): the precision is in
// its code. SCRIPT.pt is a TorchScript module in float32: the precision is that of the region
// around the call. INPUT.pt is a tensor that torch.save wrote, and OUTPUT.pt gets both results, for
// torch.load.
#include <fastamp/fastamp.h>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

torch::Tensor read_tensor(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  return torch::pickle_load(bytes).toTensor();
}

void write_pair(const std::string& path, const torch::Tensor& first, const torch::Tensor& second) {
  const auto bytes = torch::pickle_save(c10::ivalue::Tuple::create({first, second}));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file, "cannot write ", path);
}

/// A region around this call would change nothing: what was compiled calls no ops of torch's.
torch::Tensor run_package(const std::string& path, const torch::Tensor& x) {
  torch::inductor::AOTIModelPackageLoader package(path);
  return package.run({x}).front();
}

torch::Tensor run_script(const std::string& path, const torch::Tensor& x) {
  auto module = torch::jit::load(path);
  module.eval();
  const fastamp::AutocastGuard region(x.device().type(), torch::kBFloat16);
  return module.forward({x}).toTensor();
}

void serve(const std::vector<std::string>& arguments) {
  TORCH_CHECK(arguments.size() == 4, "usage: serve PACKAGE.pt2 SCRIPT.pt INPUT.pt OUTPUT.pt");
  const torch::NoGradGuard no_grad;
  const auto x = read_tensor(arguments[2]);
  const auto from_package = run_package(arguments[0], x);
  const auto from_script = run_script(arguments[1], x);
  std::cout << "package " << from_package.scalar_type() << ", script " << from_script.scalar_type()
            << '\n';
  write_pair(arguments[3], from_package, from_script);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    serve({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << '\n';
    return 1;
  }
}
