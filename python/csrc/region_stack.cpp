#include "region_stack.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

using autocast::AutocastState;

struct Frame {
  PyObject*
      owner;  ///< Strong. A plain pointer: a thread that dies inside a region may not touch Python.
  AutocastState saved;
  RegionKind kind;
};

std::atomic<std::int64_t> g_open_torch_regions = 0;

/// The open regions of a thread, innermost last. A thread that dies inside some ends them.
struct Frames : std::vector<Frame> {
  [[nodiscard]] std::int64_t of_torch() const noexcept {
    return std::count_if(begin(), end(),
                         [](const Frame& frame) { return frame.kind == RegionKind::torchs; });
  }
  Frames() = default;
  Frames(const Frames&) = delete;
  Frames(Frames&&) = delete;
  Frames& operator=(const Frames&) = delete;
  Frames& operator=(Frames&&) = delete;
  ~Frames() { g_open_torch_regions -= of_torch(); }
};

thread_local Frames t_frames;

/// Turns `ending.saved` into what ending the frame now must restore, given the frames above it.
AutocastState restored_state(const Frame& ending, std::vector<Frame>::iterator above,
                             std::vector<Frame>::iterator end) {
  AutocastState restored = ending.saved;
  const auto same_device = std::find_if(
      above, end, [&](const Frame& frame) { return frame.saved.device == ending.saved.device; });
  if (same_device != end) {
    same_device->saved.dtype = ending.saved.dtype;
    same_device->saved.enabled = ending.saved.enabled;
    restored.dtype = at::autocast::get_autocast_dtype(restored.device);
    restored.enabled = at::autocast::is_autocast_enabled(restored.device);
  }
  if (above != end) {
    above->saved.cache_enabled = ending.saved.cache_enabled;
    restored.cache_enabled = at::autocast::is_autocast_cache_enabled();
  }
  return restored;
}

}  // namespace

void push_region(PyObject* owner, const AutocastState& wanted, RegionKind kind) {
  t_frames.reserve(t_frames.size() + 1);  // May throw: before the state changes.
  t_frames.push_back({owner, autocast::enter_region(wanted), kind});
  Py_INCREF(owner);
  g_open_torch_regions += kind == RegionKind::torchs ? 1 : 0;
}

bool pop_region(PyObject* owner) noexcept {
  auto frame = t_frames.end();
  do {
    if (frame == t_frames.begin()) {
      return false;
    }
    --frame;
  } while (frame->owner != owner);
  autocast::exit_region(restored_state(*frame, std::next(frame), t_frames.end()));
  g_open_torch_regions -= frame->kind == RegionKind::torchs ? 1 : 0;
  t_frames.erase(frame);
  Py_DECREF(owner);
  return true;
}

std::int64_t open_torch_regions() noexcept { return g_open_torch_regions; }

void forget_regions_of_other_threads() noexcept { g_open_torch_regions = t_frames.of_torch(); }

}  // namespace fastamp::python
