// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "optim/encoded_moments.h"

#include <fastamp/optim/stored_state.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace fastamp::python {

void bind_moment_codes(pybind11::module_& module) {
  using torch::wrap_pybind_function;
  module.def(
      "moment_group",
      [](const std::vector<std::int64_t>& shape) { return optim::moment_group(shape); },
      pybind11::arg("shape"),
      "How many moments in 8 bits share a scale in a parameter; 0: it has none.");
  module.def("encode_moments",
             wrap_pybind_function(
                 [](const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, std::int64_t group) {
                   auto codes = optim::encode_moments(exp_avg, exp_avg_sq, group);
                   return std::make_tuple(codes.exp_avg, codes.exp_avg_sq, codes.scales);
                 }),
             pybind11::arg("exp_avg"), pybind11::arg("exp_avg_sq"), pybind11::arg("group"),
             "Codes of the two moments, and their scales.");
  module.def("decode_moments",
             wrap_pybind_function([](const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                                     const at::Tensor& scales) {
               return optim::decode_moments({exp_avg, exp_avg_sq, scales});
             }),
             pybind11::arg("exp_avg"), pybind11::arg("exp_avg_sq"), pybind11::arg("scales"),
             "The float32 moments that codes stand for.");
}

}  // namespace fastamp::python
