// SPDX-License-Identifier: Apache-2.0
#include "python_source.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace fastamp::python {
namespace {

std::vector<std::string>& skipped_folders() {
  // Never destroyed: threads may run ops while the process exits.
  static auto* folders = new std::vector<std::string>;
  return *folders;
}

bool is_skipped(std::string_view file) {
  return std::ranges::any_of(skipped_folders(),
                             [&](const std::string& folder) { return file.starts_with(folder); });
}

std::string file_of(PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  const char* text = PyUnicode_AsUTF8(code->co_filename);
  std::string file = text == nullptr ? "" : text;
  if (text == nullptr) {
    PyErr_Clear();
  }
  Py_DECREF(code);
  return file;
}

}  // namespace

void skip_source_folders(std::vector<std::string> folders) {
  skipped_folders() = std::move(folders);
}

std::string python_source() {
  if (Py_IsInitialized() == 0) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string source;
  while (frame != nullptr && source.empty()) {
    const std::string file = file_of(frame);
    if (!is_skipped(file)) {
      source = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return source;
}

}  // namespace fastamp::python
