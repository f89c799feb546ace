#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Op table, policies and registration.
void bind_policy(pybind11::module_& module);

}  // namespace fastamp::python
