// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"

#include <fastamp/autocast/guard.h>

#include <atomic>

namespace py = pybind11;

namespace fastamp::python {
namespace {

PyCFunction g_torch_clear_cache = nullptr;

PyObject* clear_both_caches(PyObject* self, PyObject* unused) {
  fastamp::clear_cast_cache();
  return g_torch_clear_cache(self, unused);
}

/// Makes torch.clear_autocast_cache, under every name it was bound to, empty our cache as well: the
/// function object stays, its C entry point changes.
void follow_clear_cache(py::handle function_handle) {
  PyObject* function = function_handle.ptr();
  if (PyCFunction_CheckExact(function) == 0 || PyCFunction_GetFlags(function) != METH_NOARGS) {
    throw py::type_error("follow_clear_cache: expected torch's own builtin clear_autocast_cache");
  }
  PyMethodDef* definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  if (definition->ml_meth != clear_both_caches) {
    g_torch_clear_cache = definition->ml_meth;
    // Other threads may call the function now.
    std::atomic_ref(definition->ml_meth).store(clear_both_caches, std::memory_order_release);
  }
}

}  // namespace

void bind_clear_cache(py::module_& module) { module.def("follow_clear_cache", follow_clear_cache); }

}  // namespace fastamp::python
