// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/float8_exclusions.h"
#include "autocast/policy/float8_setting.h"

#include <fastamp/autocast/float8.h>

#include <ATen/autocast_mode.h>

#include <utility>

namespace fastamp {

std::optional<Float8Recipe> float8_recipe(c10::DeviceType device) {
  const auto* const setting = autocast::thread_float8(device);
  const bool in_force = setting != nullptr && at::autocast::is_autocast_enabled(device) &&
                        at::autocast::get_autocast_dtype(device) == setting->carrier;
  return in_force ? std::optional(autocast::recipe_of(*setting)) : std::nullopt;
}

Float8Exclusion::Float8Exclusion(const std::vector<at::Tensor>& weights)
    : id_(autocast::exclude_from_float8(weights)) {}

void Float8Exclusion::release() noexcept {
  if (const auto id = std::exchange(id_, 0); id != 0) {
    autocast::end_float8_exclusion(id);
  }
}

}  // namespace fastamp
