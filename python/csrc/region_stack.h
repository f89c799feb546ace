#pragma once

#include "autocast/region.h"

#include <Python.h>

// The autocast regions that Python code has open on this thread.
namespace fastamp::python {

/// Enters a region on behalf of `owner`, which is kept alive until the region ends.
void push_region(PyObject* owner, const autocast::AutocastState& wanted);

/// Ends the innermost open region of `owner`. False if it has none on this thread.
///
/// Regions of interleaved generators and asyncio tasks end in any order: a region that ends below
/// others hands what it would have restored to the one above it, so that the last to end leaves the
/// state as the first one found it.
bool pop_region(PyObject* owner) noexcept;

}  // namespace fastamp::python
