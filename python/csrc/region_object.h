// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/region.h"

#include <Python.h>

#include <utility>

namespace fastamp::python {

/// Native base of fastamp.autocast. All fields are zero until __init__ has run.
struct Region {
  PyObject ob_base;
  PyObject* device;      ///< str as given
  PyObject* fast_dtype;  ///< torch.dtype
  autocast::AutocastState wanted;
};

inline Region* as_region(PyObject* self) { return reinterpret_cast<Region*>(self); }

inline void replace_reference(PyObject*& slot, PyObject* value) {
  Py_INCREF(value);
  Py_XDECREF(std::exchange(slot, value));
}

}  // namespace fastamp::python
