// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace fastamp::python {

/// tp_init of Region, with torch.autocast's signature.
int region_init(PyObject* self, PyObject* args, PyObject* kwargs);

}  // namespace fastamp::python
