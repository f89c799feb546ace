// SPDX-License-Identifier: Apache-2.0
#include "python_call_site.h"

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <ranges>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace fastamp::python {
namespace {

/// Never destroyed: threads may run ops while others are told of new ones, and while the process
/// exits.
std::atomic<const std::vector<std::string>*> g_skipped_folders{nullptr};

bool is_skipped(std::string_view file) {
  const auto* folders = g_skipped_folders.load(std::memory_order_acquire);
  return folders != nullptr && std::ranges::any_of(*folders, [&](const std::string& folder) {
           return file.starts_with(folder);
         });
}

/// The text of a str; empty if it has none, or is no str.
std::string_view text_of(PyObject* object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
  PyErr_Clear();
  return {text == nullptr ? "" : text, static_cast<std::size_t>(size)};
}

/// torch.nn.Module's method that calls forward().
bool calls_module(std::string_view file, std::string_view function) {
  return function == "_call_impl" && file.ends_with("torch/nn/modules/module.py");
}

/// The argument `self` of a frame; null if it has none.
py::object self_of(PyFrameObject* frame) {
  const auto locals = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_locals"));
  auto self = py::reinterpret_steal<py::object>(
      locals ? PyMapping_GetItemString(locals.ptr(), "self") : nullptr);
  PyErr_Clear();
  return self;
}

/// The dict of a module's children; null if it has none.
py::object children_of(PyObject* module) {
  const auto members = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  PyErr_Clear();
  PyObject* found = nullptr;
  if (members) {
    PyDict_GetItemStringRef(members.ptr(), "_modules", &found);
  }
  auto children = py::reinterpret_steal<py::object>(found);
  return children && PyDict_Check(children.ptr()) ? children : py::object();
}

/// Names a module as seen from one around it, such as "block.0.layer"; empty if it is not in it.
/// Nearer ones are looked at first.
std::string name_within(PyObject* outer, PyObject* module) {
  constexpr std::size_t kMostLookedAt = 10'000;
  struct Place {
    py::object module;
    py::object name;
    std::size_t parent;
  };
  std::vector<Place> places{{py::reinterpret_borrow<py::object>(outer), {}, 0}};
  for (std::size_t at = 0; at < places.size() && places.size() < kMostLookedAt; ++at) {
    const auto children = children_of(places[at].module.ptr());
    const py::scoped_critical_section locked(children);
    PyObject* name = nullptr;
    PyObject* child = nullptr;
    Py_ssize_t position = 0;
    while (children && PyDict_Next(children.ptr(), &position, &name, &child) != 0) {
      places.push_back({py::reinterpret_borrow<py::object>(child),
                        py::reinterpret_borrow<py::object>(name), at});
      if (child == module) {
        std::string path(text_of(name));
        for (std::size_t up = at; up != 0; up = places[up].parent) {
          path.insert(0, std::string(text_of(places[up].name.ptr())) + '.');
        }
        return path;
      }
    }
  }
  return {};
}

/// Names the last of these modules, each of which has called the one after it, in the first; a
/// module that is not within its caller begins anew.
std::string name_of_innermost(const std::vector<py::object>& modules) {
  std::string path;
  for (std::size_t i = 1; i < modules.size(); ++i) {
    const auto step = name_within(modules[i - 1].ptr(), modules[i].ptr());
    if (step.empty() || path.empty()) {
      path = step;
    } else {
      path.append(1, '.').append(step);
    }
  }
  return path.empty() && !modules.empty() ? Py_TYPE(modules.back().ptr())->tp_name : path;
}

}  // namespace

void skip_source_folders(std::vector<std::string> folders) {
  g_skipped_folders.store(new std::vector<std::string>(std::move(folders)),
                          std::memory_order_release);
}

autocast::CallSite python_call_site() {
  if (Py_IsInitialized() == 0) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  const py::error_scope pending;  // An op may have failed.
  autocast::CallSite site;
  std::vector<py::object> modules;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const auto file = text_of(code->co_filename);
    if (site.source.empty() && !is_skipped(file)) {
      site.source = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    if (calls_module(file, text_of(code->co_name))) {
      if (auto self = self_of(frame)) {
        modules.push_back(std::move(self));
      }
    }
    Py_DECREF(code);
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  std::ranges::reverse(modules);
  site.module = name_of_innermost(modules);
  return site;
}

}  // namespace fastamp::python
