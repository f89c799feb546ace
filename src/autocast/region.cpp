// SPDX-License-Identifier: Apache-2.0
#include "autocast/region.h"

#include "autocast/float8_interface.h"
#include "autocast/kept_casts.h"
#include "autocast/registration.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"
#include "core/thread_bound.h"

#include <fastamp/autocast/context.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/registration.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <ranges>
#include <utility>
#include <vector>

namespace fastamp {
namespace autocast {
namespace {

struct Frame {
  RegionId id;
  void* owner;
  AutocastState saved;  ///< What the region found when it was entered.
  RegionKind kind;
  bool had_float8;
};

using Frames = std::vector<Frame>;

/// The open regions of a thread.
struct OpenRegions {
  Frames frames;  ///< Innermost last.
  SerialNumbers ids;
};

void set_state(const AutocastState& state) noexcept {
  at::autocast::set_autocast_enabled(state.device, state.enabled);
  at::autocast::set_autocast_dtype(state.device, state.dtype);
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
  if (state.sets_float8) {
    set_thread_float8(state.device, state.float8);
  }
}

/// State that ending a frame below others must restore; the frames above take over what it found.
AutocastState hand_over(const Frame& ending, Frames::iterator above, Frames::iterator end) {
  AutocastState restored = current_state(ending.saved.device);
  const auto same_device = std::find_if(
      above, end, [&](const Frame& frame) { return frame.saved.device == ending.saved.device; });
  if (same_device == end) {
    restored.dtype = ending.saved.dtype;
    restored.enabled = ending.saved.enabled;
    restored.float8 = ending.saved.float8;
  } else {
    same_device->saved.dtype = ending.saved.dtype;
    same_device->saved.enabled = ending.saved.enabled;
    same_device->saved.float8 = ending.saved.float8;
  }
  above->saved.cache_enabled = ending.saved.cache_enabled;
  return restored;
}

/// Ends the innermost region that satisfies the predicate; returns it, if this thread has one.
template <class Predicate>
std::optional<Frame> end_innermost(const Predicate& is_wanted) noexcept {
  OpenRegions* const open = PerThread<OpenRegions>::get();
  if (open == nullptr) {
    return std::nullopt;
  }
  Frames& frames = open->frames;
  const auto found = std::ranges::find_if(frames.rbegin(), frames.rend(), is_wanted);
  if (found == frames.rend()) {
    return std::nullopt;
  }
  const auto frame = std::prev(found.base());
  const Frame ended = *frame;
  set_state(found.base() == frames.end() ? ended.saved
                                         : hand_over(ended, found.base(), frames.end()));
  frames.erase(frame);
  // Last, as destroying casts may run code that opens regions.
  const int still_open = at::autocast::decrement_nesting();
  if (on_region_left(still_open) && KeptCastStore::instance().is_used()) {
    KeptCastStore::instance().sweep_sometimes();
  }
  if (still_open == 0) {
    // Ops of other libraries keep their casts in torch's cache.
    clear_torch_cache();
  }
  return ended;
}

}  // namespace

AutocastState current_state(c10::DeviceType device) {
  return {.device = device,
          .dtype = at::autocast::get_autocast_dtype(device),
          .enabled = at::autocast::is_autocast_enabled(device),
          .cache_enabled = at::autocast::is_autocast_cache_enabled(),
          .sets_float8 = true,
          .float8 = thread_float8(device)};
}

RegionId enter_region(const AutocastState& wanted, void* owner, RegionKind kind) {
  reach_expected_ops();
  // Nothing may fail once the region is among the open ones.
  ThreadCache* const cache = prepare_thread_cache();
  auto& open = PerThread<OpenRegions>::make();
  const RegionId id = open.ids.next();
  const AutocastState found = current_state(wanted.device);
  const bool has_float8 = wanted.sets_float8 && wanted.float8 != nullptr;
  open.frames.push_back({id, owner, found, kind, has_float8});
  at::autocast::set_autocast_enabled(wanted.device, wanted.enabled);
  at::autocast::set_autocast_dtype(wanted.device, wanted.dtype);
  if (wanted.cache_enabled != found.cache_enabled) {
    at::autocast::set_autocast_cache_enabled(wanted.cache_enabled);
  }
  if (wanted.sets_float8) {
    set_thread_float8(wanted.device, wanted.float8);
  }
  on_region_entered(cache, at::autocast::increment_nesting());
  return id;
}

bool exit_region(RegionId id) noexcept {
  return end_innermost([&](const Frame& frame) { return frame.id == id; }).has_value();
}

std::size_t open_regions() noexcept {
  const OpenRegions* const open = PerThread<OpenRegions>::get();
  return open == nullptr ? 0 : open->frames.size();
}

void* owner_above(std::size_t depth) noexcept {
  return open_regions() > depth ? PerThread<OpenRegions>::get()->frames.back().owner : nullptr;
}

EndedRegion exit_region_of(const void* owner) noexcept {
  const auto ended = end_innermost([&](const Frame& frame) { return frame.owner == owner; });
  return {ended.has_value(), ended.has_value() ? ended->kind : RegionKind::kFastamp,
          ended.has_value() && ended->had_float8};
}

}  // namespace autocast

// -- The guards of C++

namespace {

using autocast::AutocastState;

/// torch.autocast warns and goes on without autocast where it cannot work; so do we.
bool can_enable(c10::DeviceType device, c10::ScalarType dtype) {
  if (device == c10::kCUDA) {
    // Asked once: while the process exits torch cannot say any more.
    static const bool has_cuda = at::Context::hasCUDA();
    if (!has_cuda) {
      TORCH_WARN(
          "AutocastGuard: expected a process with CUDA for device cuda, got none. The region is "
          "disabled.");
      return false;
    }
  } else if (dtype != c10::kBFloat16 && dtype != c10::kHalf) {
    TORCH_WARN("AutocastGuard: expected dtype to be bfloat16 or float16 on ",
               c10::DeviceTypeName(device, true), ", got ", dtype, ". The region is disabled.");
    return false;
  }
  return true;
}

AutocastState checked_state(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                            bool enabled, std::optional<bool> cache_enabled) {
  const bool is_known = device == c10::kCPU || device == c10::kCUDA;  // Saves the lookup.
  TORCH_CHECK(
      is_known || at::autocast::is_autocast_available(device),
      "AutocastGuard: expected device to be one torch has autocast for (cpu, cuda, ...), got ",
      c10::DeviceTypeName(device, true), ".");
  const auto run_dtype = dtype.has_value() ? *dtype : at::autocast::get_autocast_dtype(device);
  return {.device = device,
          .dtype = run_dtype,
          .enabled = enabled && can_enable(device, run_dtype),
          .cache_enabled = cache_enabled.has_value() ? *cache_enabled
                                                     : at::autocast::is_autocast_cache_enabled(),
          .sets_float8 = dtype.has_value(),
          .float8 = nullptr};
}

AutocastState state_with(const Float8Recipe& recipe, c10::DeviceType device, c10::ScalarType dtype,
                         bool enabled, std::optional<bool> cache_enabled) {
  const auto* const setting = autocast::float8_of_region("AutocastGuard", device, recipe, dtype);
  AutocastState state = checked_state(device, dtype, enabled, cache_enabled);
  state.float8 = setting;
  return state;
}

/// A float8 dtype on CUDA stands for a recipe. (On the CPU it is refused as torch does.)
AutocastState state_of(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled,
                       std::optional<bool> cache_enabled) {
  if (device == c10::kCUDA && dtype.has_value() && c10::isFloat8Type(*dtype)) {
    autocast::check_float8_dtype("AutocastGuard", *dtype);
    return state_with(Float8Recipe(), device, c10::kBFloat16, enabled, cache_enabled);
  }
  return checked_state(device, dtype, enabled, cache_enabled);
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                             bool enabled, std::optional<bool> cache_enabled)
    : state_((register_kernels(), state_of(device, dtype, enabled, cache_enabled))),
      id_(autocast::enter_region(state_)) {}

AutocastGuard::AutocastGuard(c10::DeviceType device, const Float8Recipe& recipe,
                             c10::ScalarType dtype, bool enabled, std::optional<bool> cache_enabled)
    : state_((register_kernels(), state_with(recipe, device, dtype, enabled, cache_enabled))),
      id_(autocast::enter_region(state_)) {}

void AutocastGuard::release() noexcept {
  const auto id = std::exchange(id_, 0);
  if (id != 0 && !autocast::exit_region(id)) {
    warn_of_other_thread("AutocastGuard");
  }
}

void clear_cast_cache() { autocast::clear_thread_cache(); }

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
  policies_ = detail::push_op_policies(context.policies_, detail::OverrideMode::kReplace);
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
