// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds the type `UninterruptedCall` to the module. Returns false with a Python error set.
///
/// UninterruptedCall(function)[x] is function(x), by an instruction after which the interpreter
/// does not look for signals. From Python 3.14 on `with` calls `__enter__` by the instruction of
/// all calls, after which it does look where the function is one of C: a KeyboardInterrupt could
/// arrive after a region was entered but before `with` knows. After the return of a Python function
/// it does not look.
bool add_uninterrupted_call_type(PyObject* module);

}  // namespace fastamp::python
