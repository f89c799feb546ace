// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/region.h"

#include <Python.h>

#include <cstdint>

// The autocast regions that Python code has open on this thread.
namespace fastamp::python {

using autocast::RegionKind;

/// Enters a region on behalf of `owner`, which is kept alive until the region ends.
void push_region(PyObject* owner, const autocast::AutocastState& wanted,
                 RegionKind kind = RegionKind::kFastamp);

/// Ends the innermost open region of `owner`, if it has one on this thread.
autocast::EndedRegion pop_region(PyObject* owner) noexcept;

/// Number of regions of torch's class that are open in this process, on any thread.
std::int64_t open_torch_regions() noexcept;

/// Forgets the regions of threads that the child of a fork does not have; called in the child.
void forget_regions_of_other_threads() noexcept;

}  // namespace fastamp::python
