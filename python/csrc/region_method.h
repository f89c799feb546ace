#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds the type `RegionMethod` to the module. Returns false with a Python error set.
///
/// RegionMethod(function, entering) takes the place of a method of torch's region classes, the
/// Python function it is made of. It binds as a function does; to call, it is C. The interpreter
/// looks for signals when a Python function begins and after each call in it: a KeyboardInterrupt
/// would arrive when the state has changed and `with` does not know yet, or when `with` has ended
/// and the state is still to change back. It does not look within a C function, nor on the way
/// between one and `with`.
bool add_region_method_type(PyObject* module);

}  // namespace fastamp::python
