// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"

#include <fastamp/build_info.h>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

py::dict build_info() {
  const auto info = fastamp::build_info();
  py::dict d;
  d["version"] = info.version;
  d["torch_version"] = info.torch_version;
  d["cuda_version"] = info.cuda_version;
  d["cuda_archs"] = info.cuda_archs;
  d["compiler"] = info.compiler;
  d["build_type"] = info.build_type;
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used(FASTAMP_FREE_THREADED)) {
  m.doc() = "Native part of fastamp.";
  m.def("build_info", build_info);
  m.def("why_no_cuda_part", fastamp::why_no_cuda_part);
  if (!fastamp::python::add_region_type(m.ptr()) ||
      !fastamp::python::add_torch_region_functions(m.ptr()) ||
      !fastamp::python::add_mirror_type(m.ptr()) || !fastamp::python::add_optimizer_hook(m.ptr())) {
    throw py::error_already_set();
  }
  fastamp::python::bind_cast_node(m);
  fastamp::python::bind_clear_cache(m);
  fastamp::python::bind_convert(m);
  fastamp::python::bind_float8(m);
  fastamp::python::bind_gradients(m);
  fastamp::python::bind_held_state(m);
  fastamp::python::bind_kept_casts(m);
  fastamp::python::bind_optim(m);
  fastamp::python::bind_policy(m);
  fastamp::python::bind_ranges(m);
  fastamp::python::bind_scaler(m);
  fastamp::python::bind_amp_step(m);
  fastamp::python::bind_trace(m);
}
