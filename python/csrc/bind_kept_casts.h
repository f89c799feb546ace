#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Casts of weights that outlive regions.
void bind_kept_casts(pybind11::module_& module);

}  // namespace fastamp::python
