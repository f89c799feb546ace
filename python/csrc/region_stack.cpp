// SPDX-License-Identifier: Apache-2.0
#include "region_stack.h"

#include <atomic>

namespace fastamp::python {
namespace {

std::atomic<std::int64_t> g_open_torch_regions = 0;

/// The open regions of torch's class on a thread. A thread that dies inside some ends them.
struct OpenTorchRegions {
  std::int64_t count = 0;

  OpenTorchRegions() = default;
  OpenTorchRegions(const OpenTorchRegions&) = delete;
  OpenTorchRegions(OpenTorchRegions&&) = delete;
  OpenTorchRegions& operator=(const OpenTorchRegions&) = delete;
  OpenTorchRegions& operator=(OpenTorchRegions&&) = delete;
  ~OpenTorchRegions() { add(-count); }

  void add(std::int64_t regions) noexcept {
    count += regions;
    g_open_torch_regions += regions;
  }
};

thread_local OpenTorchRegions t_open_torch_regions;

}  // namespace

void push_region(PyObject* owner, const autocast::AutocastState& wanted, RegionKind kind) {
  autocast::enter_region(wanted, owner, kind);
  // The stack has a plain pointer: a thread that dies inside a region must not touch Python.
  Py_INCREF(owner);
  if (kind == RegionKind::kTorch) {
    t_open_torch_regions.add(1);
  }
}

autocast::EndedRegion pop_region(PyObject* owner) noexcept {
  const auto ended = autocast::exit_region_of(owner);
  if (!ended.found) {
    return ended;
  }
  if (ended.kind == RegionKind::kTorch) {
    t_open_torch_regions.add(-1);
  }
  Py_DECREF(owner);
  return ended;
}

std::int64_t open_torch_regions() noexcept { return g_open_torch_regions; }

void forget_regions_of_other_threads() noexcept {
  g_open_torch_regions = t_open_torch_regions.count;
}

}  // namespace fastamp::python
