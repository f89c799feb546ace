// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

// Implements regions of torch's own class by our native ones.
namespace fastamp::python {

/// Enters the region. A new reference to it, or nullptr with a Python error set and nothing
/// changed.
PyObject* enter_torch_region(PyObject* region);

enum class Leaving : unsigned char {
  kDone,     ///< The region has ended.
  kFailed,   ///< The region has ended, and a Python error is set.
  kUnknown,  ///< It was not entered by enter_torch_region, or is not open. Nothing changed.
};

Leaving leave_torch_region(PyObject* region);

}  // namespace fastamp::python
