// SPDX-License-Identifier: Apache-2.0
#include "autocast/kept_casts.h"
#include "autocast/thread_cache.h"
#include "bindings.h"

#include <ATen/record_function.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <vector>

namespace py = pybind11;

namespace fastamp::python {
namespace {

using autocast::KeptCastStore;

/// The tensors in the optimizer's groups.
std::vector<const c10::TensorImpl*> weights_of(py::handle optimizer) {
  std::vector<const c10::TensorImpl*> weights;
  for (const py::handle group : optimizer.attr("param_groups")) {
    for (const py::handle weight : group["params"]) {
      if (THPVariable_Check(weight.ptr())) {
        weights.push_back(THPVariable_Unpack(weight.ptr()).unsafeGetTensorImpl());
      }
    }
  }
  return weights;
}

PyObject* end_casts_of(py::handle optimizer) {
  HANDLE_TH_ERRORS
  // Our own steps move the counters, and the casts they leave hold.
  if (!py::hasattr(optimizer, "_fastamp_supports_amp_step") ||
      !py::cast<bool>(optimizer.attr("_fastamp_supports_amp_step"))) {
    const auto weights = weights_of(optimizer);
    autocast::forget_weight_casts(weights);
    KeptCastStore::instance().drop(weights);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* after_optimizer_step(PyObject* /*module*/, PyObject* const* args, Py_ssize_t nargs) {
  // torch calls this after every step of every optimizer, and there is nearly always nothing to do:
  // preparing for errors would cost ten times as much.
  const bool any_casts = autocast::has_weight_casts() || KeptCastStore::instance().is_used();
  if (nargs > 0 && any_casts) {
    return end_casts_of(args[0]);
  }
  Py_RETURN_NONE;
}

PyObject* has_observers(PyObject* /*module*/, PyObject* /*none*/) {
  return PyBool_FromLong(at::hasCallbacks() ? 1 : 0);
}

// METH_FASTCALL functions have another type than the field; CPython's own modules cast them the
// same way.
std::array<PyMethodDef, 3> g_hook_functions{{
    {"after_optimizer_step",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(after_optimizer_step)),
     METH_FASTCALL, nullptr},
    {"has_observers", has_observers, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

}  // namespace

bool add_optimizer_hook(PyObject* module) {
  return PyModule_AddFunctions(module, g_hook_functions.data()) == 0;
}

}  // namespace fastamp::python
