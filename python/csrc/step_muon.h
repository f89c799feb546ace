// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// One step of a Muon optimizer: gather, then its passes with the GIL released.
/// @param amp_step  fastamp._C.AmpStep or None.
/// @returns What gather_step returns.
pybind11::list muon_step(pybind11::handle optimizer, pybind11::handle amp_step);

}  // namespace fastamp::python
