// SPDX-License-Identifier: Apache-2.0
#include "autocast/policy/float8_mirror.h"
#include "autocast/region.h"
#include "core/thread_bound.h"

#include <fastamp/autocast/context.h>
#include <fastamp/autocast/registration.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <ranges>
#include <utility>

namespace fastamp {
namespace {

struct Capsule final : torch::CustomClassHolder {
  explicit Capsule(AutocastContext held) : context(std::move(held)) {}
  AutocastContext context;
};

}  // namespace

AutocastContext AutocastContext::current() {
  AutocastContext context;
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (autocast::is_float8_mirror(device)) {
      continue;  // Follows what the others set.
    }
    const auto state = autocast::current_state(device);
    if (state.enabled || device == c10::kCPU || device == c10::kCUDA) {
      context.devices_.push_back(state);
    }
  }
  context.policies_ = detail::thread_op_policies();
  return context;
}

c10::IValue AutocastContext::to_ivalue() const {
  return c10::IValue::make_capsule(c10::make_intrusive<Capsule>(*this));
}

AutocastContext AutocastContext::from_ivalue(const c10::IValue& value) {
  const auto holder = value.isCapsule() ? value.toCapsule() : nullptr;
  const auto* capsule = dynamic_cast<const Capsule*>(holder.get());
  TORCH_CHECK_VALUE(capsule != nullptr,
                    "AutocastContext::from_ivalue: expected a value from to_ivalue(), got ",
                    value.tagKind(), ". Store the context in the forward pass first.");
  return capsule->context;
}

bool AutocastContext::enabled(c10::DeviceType device) const {
  return std::ranges::any_of(devices_, [&](const detail::AutocastState& state) {
    return state.device == device && state.enabled;
  });
}

AutocastContextGuard::AutocastContextGuard(const AutocastContext& context) {
  register_kernels();
  regions_.reserve(context.devices_.size());
  policies_ = detail::push_op_policies(context.policies_, detail::OverrideMode::replace);
  try {
    for (const auto& state : context.devices_) {
      regions_.push_back(autocast::enter_region(state));
    }
  } catch (...) {
    release();
    throw;
  }
}

void AutocastContextGuard::release() noexcept {
  bool found = true;
  for (const auto region : std::views::reverse(regions_)) {
    found = autocast::exit_region(region) && found;
  }
  regions_.clear();
  if (const auto pushed = std::exchange(policies_, 0); pushed != 0) {
    found = detail::pop_op_policies(pushed) && found;
  }
  if (!found) {
    warn_of_other_thread("AutocastContextGuard");
  }
}

}  // namespace fastamp
