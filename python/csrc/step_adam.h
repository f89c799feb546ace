// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// One step of an Adam or AdamW optimizer: gather, then one fused op per device with the GIL
/// released.
/// @param amp_step  fastamp._C.AmpStep or None.
/// @returns What gather_step returns.
pybind11::list adam_step(pybind11::handle optimizer, pybind11::handle amp_step);

}  // namespace fastamp::python
