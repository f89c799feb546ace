// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"

#include <fastamp/ops/number_range.h>
#include <fastamp/scaler/reports.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace fastamp::python {

void bind_ranges(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<NumberRange>(module, "NumberRange", R"(Counts the elements of tensors by power of two.

Methods take a ``dtype`` to which all would be rounded, after a multiplication by ``2**shift``.

Attributes:
    elements: How many there are,
    zeros: how many are 0,
    inf: infinite,
    nan: and NaN.
    greatest: Magnitude of the largest finite one; 0 without one.
    least: Magnitude of the smallest one that is not 0; 0 without one.)")
      .def(py::init<>())
      .def_static("of", wrap_pybind_function(&NumberRange::of), py::arg("tensor"))
      .def_static("of_each", wrap_pybind_function([](const std::vector<at::Tensor>& tensors) {
                    return NumberRange::of_each(tensors);
                  }),
                  py::arg("tensors"))
      .def("__iadd__",
           [](NumberRange& range, const NumberRange& other) -> NumberRange& {
             return range += other;
           })
      .def_property_readonly("elements", &NumberRange::elements)
      .def_property_readonly("zeros", &NumberRange::zeros)
      .def_property_readonly("inf", &NumberRange::inf)
      .def_property_readonly("nan", &NumberRange::nan)
      .def_property_readonly("greatest", &NumberRange::greatest)
      .def_property_readonly("least", &NumberRange::least)
      .def("at_exponent", wrap_pybind_function(&NumberRange::at_exponent), py::arg("exponent"))
      .def("share_of_zeros", wrap_pybind_function(&NumberRange::share_of_zeros), py::arg("dtype"),
           py::arg("shift") = 0)
      .def("share_of_subnormals", wrap_pybind_function(&NumberRange::share_of_subnormals),
           py::arg("dtype"), py::arg("shift") = 0)
      .def("largest_shift", wrap_pybind_function(&NumberRange::largest_shift), py::arg("dtype"));
  py::class_<UnderflowReport>(module, "UnderflowReport")
      .def(py::init<>())
      .def_readonly("step", &UnderflowReport::step)
      .def_readonly("scale", &UnderflowReport::scale)
      .def_readonly("range", &UnderflowReport::range)
      .def_readonly("elements", &UnderflowReport::elements)
      .def("share_of_zeros", wrap_pybind_function(&UnderflowReport::share_of_zeros),
           py::arg("other"))
      .def("largest_scale", wrap_pybind_function(&UnderflowReport::largest_scale));
}

}  // namespace fastamp::python
