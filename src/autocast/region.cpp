#include "autocast/region.h"

#include "autocast/thread_bound.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_cache.h"

#include <fastamp/autocast/registration.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <iterator>
#include <optional>
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
};

using Frames = std::vector<Frame>;

/// The open regions of a thread.
struct OpenRegions {
  Frames frames;  ///< Innermost last.
  SerialNumbers ids;
};

AutocastState current_state(c10::DeviceType device) {
  return {device, at::autocast::get_autocast_dtype(device),
          at::autocast::is_autocast_enabled(device), at::autocast::is_autocast_cache_enabled()};
}

void set_state(const AutocastState& state) noexcept {
  at::autocast::set_autocast_enabled(state.device, state.enabled);
  at::autocast::set_autocast_dtype(state.device, state.dtype);
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
}

/// What ending a frame below others must restore. The frames above take over what it found.
AutocastState hand_over(const Frame& ending, Frames::iterator above, Frames::iterator end) {
  AutocastState restored = current_state(ending.saved.device);
  const auto same_device = std::find_if(
      above, end, [&](const Frame& frame) { return frame.saved.device == ending.saved.device; });
  if (same_device == end) {
    restored.dtype = ending.saved.dtype;
    restored.enabled = ending.saved.enabled;
  } else {
    same_device->saved.dtype = ending.saved.dtype;
    same_device->saved.enabled = ending.saved.enabled;
  }
  above->saved.cache_enabled = ending.saved.cache_enabled;
  return restored;
}

/// Ends the innermost region that is wanted; returns it, if there is one on this thread.
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
  on_region_left(still_open);
  if (still_open == 0) {
    // Ops of other libraries keep their casts in torch's cache.
    clear_torch_cache();
  }
  return ended;
}

/// torch.autocast warns and goes on without autocast where it cannot work; so do we.
bool can_enable(c10::DeviceType device, c10::ScalarType dtype) {
  if (device == c10::kCUDA) {
    // Asked once: while the process exits torch cannot tell any more.
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
  const bool is_known = device == c10::kCPU || device == c10::kCUDA;  // Spares the question.
  TORCH_CHECK(
      is_known || at::autocast::is_autocast_available(device),
      "AutocastGuard: expected device to be one torch has autocast for (cpu, cuda, ...), got ",
      c10::DeviceTypeName(device, true), ".");
  const auto run_dtype = dtype.has_value() ? *dtype : at::autocast::get_autocast_dtype(device);
  return {device, run_dtype, enabled && can_enable(device, run_dtype),
          cache_enabled.has_value() ? *cache_enabled : at::autocast::is_autocast_cache_enabled()};
}

}  // namespace

RegionId enter_region(const AutocastState& wanted, void* owner, RegionKind kind) {
  auto& open = PerThread<OpenRegions>::make();
  const RegionId id = open.ids.next();
  const AutocastState found = current_state(wanted.device);
  open.frames.push_back({id, owner, found, kind});
  at::autocast::set_autocast_enabled(wanted.device, wanted.enabled);
  at::autocast::set_autocast_dtype(wanted.device, wanted.dtype);
  if (wanted.cache_enabled != found.cache_enabled) {
    at::autocast::set_autocast_cache_enabled(wanted.cache_enabled);
  }
  on_region_entered(at::autocast::increment_nesting());
  return id;
}

bool exit_region(RegionId id) noexcept {
  return end_innermost([&](const Frame& frame) { return frame.id == id; }).has_value();
}

EndedRegion exit_region_of(const void* owner) noexcept {
  const auto ended = end_innermost([&](const Frame& frame) { return frame.owner == owner; });
  return {ended.has_value(), ended.has_value() ? ended->kind : RegionKind::ours};
}

}  // namespace autocast

AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                             bool enabled, std::optional<bool> cache_enabled)
    : state_((install(), autocast::checked_state(device, dtype, enabled, cache_enabled))),
      id_(autocast::enter_region(state_)) {}

void AutocastGuard::release() noexcept {
  const auto id = std::exchange(id_, 0);
  if (id != 0 && !autocast::exit_region(id)) {
    autocast::warn_of_other_thread("AutocastGuard");
  }
}

void clear_cast_cache() { autocast::clear_thread_cache(); }

}  // namespace fastamp
