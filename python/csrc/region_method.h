// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds the type `RegionMethod` to the module. Returns false with a Python error set.
///
/// RegionMethod(function, entering) replaces `function`, a Python method of torch's region classes.
/// It binds as a function does, but its call is C. The interpreter looks for signals when a Python
/// function begins and after each call in it: a KeyboardInterrupt could arrive after the state has
/// changed but before `with` knows, or after `with` has ended but before the state has changed
/// back. Within a C function, and between it and `with`, the interpreter does not look.
bool add_region_method_type(PyObject* module);

}  // namespace fastamp::python
