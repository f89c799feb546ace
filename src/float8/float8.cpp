// SPDX-License-Identifier: Apache-2.0
#include "float8/exclusions.h"
#include "float8/recipe.h"

#include <fastamp/autocast/float8.h>

#include <ATen/autocast_mode.h>

#include <utility>

namespace fastamp {

std::optional<Float8Recipe> float8_recipe(c10::DeviceType device) {
  using autocast::PolicyDevice;
  const bool has_policies = device == c10::kCPU || device == c10::kCUDA;
  if (!has_policies || !at::autocast::is_autocast_enabled(device)) {
    return std::nullopt;
  }
  const auto* const setting =
      autocast::float8_in_force(device == c10::kCPU ? PolicyDevice::cpu : PolicyDevice::cuda);
  return setting == nullptr ? std::nullopt : std::optional(autocast::recipe_of(*setting));
}

Float8Exclusion::Float8Exclusion(const std::vector<at::Tensor>& weights)
    : id_(autocast::exclude_from_float8(weights)) {}

void Float8Exclusion::release() noexcept {
  if (const auto id = std::exchange(id_, 0); id != 0) {
    autocast::end_float8_exclusion(id);
  }
}

}  // namespace fastamp
