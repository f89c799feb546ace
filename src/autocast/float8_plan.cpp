// SPDX-License-Identifier: Apache-2.0
#include "autocast/float8_calls.h"
#include "autocast/float8_gpu.h"
#include "autocast/float8_setting.h"

#include <fastamp/autocast/float8_plan.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>

namespace fastamp {
namespace {

constexpr const char* kName = "float8_plan";

/// What is predicted for where there is no GPU.
constexpr const char* kDefaultGpu = "H200 SXM";

const autocast::Float8Gpu& gpu_of(const std::string& name) {
  const auto* const present = name.empty() ? autocast::float8_gpu(c10::kCUDA) : nullptr;
  return present != nullptr ? *present
                            : autocast::float8_gpu_named(kName, name.empty() ? kDefaultGpu : name);
}

}  // namespace

std::vector<std::string> float8_gpus() {
  std::vector<std::string> names;
  names.reserve(autocast::kFloat8Gpus.size());
  for (const auto& gpu : autocast::kFloat8Gpus) {
    names.emplace_back(gpu.name);
  }
  return names;
}

std::vector<Float8PlanRow> float8_plan(const std::vector<Float8Shape>& shapes,
                                       const std::string& gpu, const Float8Recipe& recipe,
                                       c10::ScalarType carrier) {
  const auto& predicted_for = gpu_of(gpu);
  const auto& setting = *autocast::float8_setting(kName, recipe, carrier);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto& [m, k, n] = std::array{shapes[i].m, shapes[i].k, shapes[i].n};
    TORCH_CHECK_VALUE(m >= 0 && k >= 0 && n >= 0, kName, ": expected sizes of shapes[", i,
                      "] to be at least 0, got m ", m, ", k ", k, ", n ", n, ".");
  }
  std::vector<Float8PlanRow> rows;
  rows.reserve(shapes.size());
  for (const auto& shape : shapes) {
    const auto outcome = autocast::float8_outcome(shape, setting, &predicted_for);
    rows.push_back(autocast::float8_plan_row(shape, outcome, setting, &predicted_for));
  }
  return rows;
}

}  // namespace fastamp
