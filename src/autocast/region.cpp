// SPDX-License-Identifier: Apache-2.0
#include "autocast/region.h"

#include "autocast/cache/kept_casts.h"
#include "autocast/cache/thread_cache.h"
#include "autocast/policy/float8_setting.h"
#include "autocast/torch/torch_cache.h"
#include "core/thread_bound.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp::autocast {
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

/// What ending a frame below others must restore; the frames above take over what it found.
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
  on_region_entered(at::autocast::increment_nesting());
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
  return {ended.has_value(), ended.has_value() ? ended->kind : RegionKind::ours,
          ended.has_value() && ended->had_float8};
}

}  // namespace fastamp::autocast
