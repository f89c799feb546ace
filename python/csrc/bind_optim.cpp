// SPDX-License-Identifier: Apache-2.0
#include "autocast/weight_aliases.h"
#include "bindings.h"
#include "optim/starting_masters.h"
#include "python_step.h"

#include <fastamp/optim/stored_state.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

namespace fastamp::python {

namespace {

/// A tensor that may be undefined, as Python has it.
template <at::Tensor (*function)(const at::Tensor&)>
std::optional<at::Tensor> optional_of(const at::Tensor& param) {
  const auto found = function(param);
  return found.defined() ? std::optional(found) : std::nullopt;
}

void set_starting_masters(const std::vector<py::object>& params,
                          const std::vector<at::Tensor>& masters) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(params.size());
  for (const auto& param : params) {
    tensors.push_back(param.cast<at::Tensor>());
  }
  optim::set_starting_masters(tensors, masters);
  for (std::size_t i = 0; i < params.size(); ++i) {
    // The pointer is not followed: what is kept for the parameter keeps its address.
    const auto forget = [impl = tensors[i].unsafeGetTensorImpl()](py::handle reference) {
      optim::forget_starting_master(impl);
      reference.dec_ref();
    };
    py::weakref(params[i], py::cpp_function(forget)).release();
  }
}

void forget_starting_masters(const std::vector<at::Tensor>& params) {
  for (const auto& param : params) {
    optim::forget_starting_master(param.unsafeGetTensorImpl());
  }
}

}  // namespace

void bind_optim(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<WeightCopyOptions>(module, "WeightCopies",
                                "The weight copies of one optimizer, and their dtype.")
      .def(py::init<at::ScalarType>(), py::arg("dtype"))
      .def_readonly("dtype", &WeightCopyOptions::dtype);
  module.def(
      "sgd_step", wrap_pybind_function(sgd_step), py::arg("optimizer"), py::arg("amp_step"),
      "One fused step of an SGD optimizer, with an AmpStep or None. Returns (index of group, "
      "parameter) for what is left to torch's own step.");
  module.def("master_from_remainder", wrap_pybind_function(optim::master_from_remainder),
             py::arg("param"), py::arg("remainder"),
             "The float32 master of a 16-bit parameter and its int16 remainder.");
  module.def("remainder_from_master", wrap_pybind_function(optim::remainder_from_master),
             py::arg("param"), py::arg("master"),
             "What a 16-bit parameter lacks of a float32 master.");
  module.def("mark_low_precision_weights",
             wrap_pybind_function([](const std::vector<at::Tensor>& weights) {
               autocast::mark_low_precision_weights(weights);
             }),
             py::arg("weights"),
             "Makes regions sum the gradients of 16-bit weights as those of float32 weights.");
  module.def("is_low_precision_weight", wrap_pybind_function(autocast::is_low_precision_weight),
             py::arg("tensor"), "Whether mark_low_precision_weights was called for a tensor.");
  module.def("current_master", wrap_pybind_function(optim::current_master), py::arg("param"),
             py::arg("master"),
             "The master where a parameter is still it rounded, or the parameter.");
  bind_moment_codes(module);
  module.def("set_starting_masters", wrap_pybind_function(set_starting_masters), py::arg("params"),
             py::arg("masters"),
             "Keeps float32 values of parameters until an optimizer's first step takes them.");
  module.def("starting_master_of", wrap_pybind_function(optional_of<optim::starting_master_of>),
             py::arg("param"),
             "The values kept for a parameter, as it was written since; None without them.");
  module.def("kept_starting_master", wrap_pybind_function(optional_of<optim::kept_starting_master>),
             py::arg("param"), "The values as they were kept.");
  module.def("forget_starting_masters", wrap_pybind_function(forget_starting_masters),
             py::arg("params"), "Forgets the values kept for parameters.");
  module.def("forget_frozen_starting_masters",
             wrap_pybind_function(optim::forget_frozen_starting_masters),
             "Forgets those of all parameters that require no gradient any more.");
  module.def("with_starting_masters", wrap_pybind_function(optim::with_starting_masters),
             "The parameters for which any are kept.");
  module.def("adam_step", wrap_pybind_function(adam_step), py::arg("optimizer"),
             py::arg("amp_step"), "The same for Adam and AdamW.");
  module.def("muon_step", wrap_pybind_function(muon_step), py::arg("optimizer"),
             py::arg("amp_step"), "The same for Muon.");
}

}  // namespace fastamp::python
