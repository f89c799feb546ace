// SPDX-License-Identifier: Apache-2.0
#include "digits_report.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/module.h>

#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>

namespace digits {

namespace {

constexpr auto kUsage =
    "usage: digits DATA [--iters N] [--shorter fp16=200,fp8=50] [--marks 1,100,...] "
    "[--until-loss X] [--json FILE]; examples/data/digits.py writes DATA";

std::vector<std::int64_t> parse_list(const std::string& text) {
  std::vector<std::int64_t> numbers;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    numbers.push_back(std::stoll(part));
  }
  return numbers;
}

std::map<std::string, std::int64_t> parse_pairs(const std::string& text) {
  std::map<std::string, std::int64_t> numbers;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto sign = part.find('=');
    numbers[part.substr(0, sign)] = std::stoll(part.substr(sign + 1));
  }
  return numbers;
}

}  // namespace

Options parse_options(int argc, char** argv) try {
  const std::vector<std::string> words(argv + 1, argv + argc);
  Options options;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto& word = words[i];
    if (word.rfind("--", 0) != 0 && options.data.empty()) {
      options.data = word;
      continue;
    }
    const auto& value = words.at(i + 1);
    ++i;
    if (word == "--iters") {
      options.iters = std::stoll(value);
    } else if (word == "--shorter") {
      options.shorter = parse_pairs(value);
    } else if (word == "--marks") {
      options.marks = parse_list(value);
    } else if (word == "--until-loss") {
      options.until_loss = std::stod(value);
    } else if (word == "--json") {
      options.json = value;
    } else {
      throw std::invalid_argument(word);
    }
  }
  if (options.data.empty() || options.iters < 1) {
    throw std::invalid_argument("DATA is missing or N is below 1");
  }
  return options;
} catch (const std::logic_error& error) {  // also of stoll, stod and at
  throw std::invalid_argument(std::string(kUsage) + " (" + error.what() + ")");
}

Data read_data(const std::string& path, c10::Device device) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, "; examples/data/digits.py writes it");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto content = torch::jit::pickle_load(bytes).toGenericDict();
  Data data{content.at("x").toTensor().to(device), content.at("y").toTensor().to(device), {}};
  for (const auto& entry : content.at("model").toGenericDict()) {
    data.model.emplace(entry.key().toStringRef(), entry.value().toTensor());
  }
  return data;
}

void load_parameters(torch::nn::Module& module, const Data& data) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters()) {
    parameter.value().copy_(data.model.at(parameter.key()));
  }
}

}  // namespace digits
