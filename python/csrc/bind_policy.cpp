#include "bind_policy.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/registration.h>

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace fastamp::python {
namespace {

c10::DeviceType parse_device(const char* function, const std::string& device) {
  if (device == "cpu") {
    return c10::kCPU;
  }
  TORCH_CHECK_VALUE(device == "cuda", function, ": expected device to be 'cpu' or 'cuda', got '",
                    device, "'.");
  return c10::kCUDA;
}

std::string get_policy(const std::string& op, const std::string& device) {
  return std::string(to_string(op_policy(op, parse_device("op_policy", device))));
}

void set_policy(const std::string& op, const std::string& policy,
                const std::optional<std::string>& device) {
  std::optional<c10::DeviceType> type;
  if (device.has_value()) {
    type = parse_device("set_op_policy", *device);
  }
  set_op_policy(op, op_policy_from_string(policy), type);
}

using Row = std::tuple<std::string, std::string, std::string, std::string, std::string>;

std::vector<Row> get_table() {
  std::vector<Row> rows;
  for (const auto& row : op_table()) {
    rows.emplace_back(row.op, to_string(row.cpu), to_string(row.cuda), to_string(row.cpu_default),
                      to_string(row.cuda_default));
  }
  return rows;
}

}  // namespace

void bind_policy(pybind11::module_& module) {
  module.def("op_policy", torch::wrap_pybind_function(get_policy));
  module.def("set_op_policy", torch::wrap_pybind_function(set_policy));
  module.def("reset_op_policies", torch::wrap_pybind_function(reset_op_policies));
  module.def("op_table", torch::wrap_pybind_function(get_table));
  module.def("install", torch::wrap_pybind_function(install));
  module.def("uninstall", torch::wrap_pybind_function(uninstall));
  module.def("is_installed", torch::wrap_pybind_function(is_installed));
  module.def("clear_cast_cache", torch::wrap_pybind_function(clear_cast_cache));
}

}  // namespace fastamp::python
