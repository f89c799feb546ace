#include "bind_scaler.h"

#include <fastamp/build_info.h>

#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of fastamp.";
  m.def("build_info", [] {
    const auto info = fastamp::build_info();
    py::dict d;
    d["version"] = info.version;
    d["torch_version"] = info.torch_version;
    d["cuda_version"] = info.cuda_version;
    d["cuda_archs"] = info.cuda_archs;
    d["compiler"] = info.compiler;
    d["build_type"] = info.build_type;
    return d;
  });
  fastamp::python::bind_scaler(m);
}
