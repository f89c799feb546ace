#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Lets torch.clear_autocast_cache() empty our cast cache too.
void bind_clear_cache(pybind11::module_& module);

}  // namespace fastamp::python
