#pragma once

#include "autocast/region.h"

#include <Python.h>

#include <cstdint>

// The autocast regions that Python code has open on this thread.
namespace fastamp::python {

/// Whose class a region is an instance of.
enum class RegionKind : bool { ours, torchs };

/// Enters a region on behalf of `owner`, which is kept alive until the region ends.
void push_region(PyObject* owner, const autocast::AutocastState& wanted,
                 RegionKind kind = RegionKind::ours);

/// Ends the innermost open region of `owner`. False if it has none on this thread.
///
/// Regions of interleaved generators and asyncio tasks end in any order: a region that ends below
/// others hands what it would have restored to the one above it, so that the last to end leaves the
/// state as the first one found it.
bool pop_region(PyObject* owner) noexcept;

/// How many regions of torch's class are open in this process, on any thread.
std::int64_t open_torch_regions() noexcept;

/// To be called in the child of a fork, which has this thread alone.
void forget_regions_of_other_threads() noexcept;

}  // namespace fastamp::python
