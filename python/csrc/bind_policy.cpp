// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_names.h"
#include "autocast/unify.h"
#include "bindings.h"
#include "held_state.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/policy_preset.h>
#include <fastamp/autocast/registration.h>

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
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

std::optional<c10::DeviceType> parse_optional(const char* function,
                                              const std::optional<std::string>& device) {
  return device.has_value() ? std::optional(parse_device(function, *device)) : std::nullopt;
}

/// Calls a function of the library, whose errors begin with its name, `own`; to users of Python
/// they begin with `shown`.
template <class Function>
auto with_errors_of(std::string_view own, const char* shown, const Function& function) {
  try {
    return function();
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    const bool is_own = text.starts_with(own);
    TORCH_CHECK_VALUE(false, is_own ? shown : "", is_own ? text.substr(own.size()) : text);
  }
}

std::string get_policy(const std::string& op, const std::string& device) {
  const auto type = parse_device("policies.get", device);
  const auto policy =
      with_errors_of("op_policy", "policies.get", [&] { return op_policy(op, type); });
  return std::string(to_string(policy));
}

void set_policy(const std::string& op, const std::string& policy,
                const std::optional<std::string>& device) {
  const auto wanted = autocast::policy_named("policies.set: expected policy", policy);
  const auto type = parse_optional("policies.set", device);
  with_errors_of("set_op_policy", "policies.set", [&] { set_op_policy(op, wanted, type); });
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

/// An override set as Python holds it: opaque.
struct Overrides {
  detail::SharedOverrides value;
};

/// A device, or none for both, and (op, policy) in force there.
using EditsOfDevice =
    std::pair<std::optional<std::string>, std::vector<std::pair<std::string, std::string>>>;

Overrides checked_policies(const std::vector<EditsOfDevice>& edits_of_devices) {
  std::vector<OpPolicyEdit> parsed;
  for (const auto& [device, edits] : edits_of_devices) {
    const auto type = parse_optional("policies.override", device);
    for (const auto& [op, policy] : edits) {
      parsed.push_back(
          {op, autocast::policy_named("policies.override: expected policy", policy), type});
    }
  }
  return {detail::checked_op_policies("policies.override", parsed)};
}

/// Calls a function in a block of op policies.
pybind11::object run_under(const Overrides& policies, const pybind11::handle& function,
                           const pybind11::tuple& args, const pybind11::dict& kwargs) {
  struct Pushed {
    explicit Pushed(const Overrides& policies)
        : id(detail::push_op_policies(policies.value, detail::OverrideMode::kAdd)) {}
    ~Pushed() { detail::pop_op_policies(id); }
    Pushed(const Pushed&) = delete;
    Pushed& operator=(const Pushed&) = delete;
    Pushed(Pushed&&) = delete;
    Pushed& operator=(Pushed&&) = delete;
    std::uint64_t id;
  };
  const HeldPolicies held;
  const Pushed pushed(policies);
  PyObject* result = PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr());
  if (result == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

std::vector<std::pair<std::string, std::string>> preset(const std::string& source,
                                                        const std::string& device) {
  std::vector<std::pair<std::string, std::string>> edits;
  for (const auto& edit : policy_preset(parse_device("policies.copy_from", source),
                                        parse_device("policies.copy_from", device))) {
    edits.emplace_back(edit.op, to_string(edit.policy));
  }
  return edits;
}

/// (op, policy, device)
std::vector<std::tuple<std::string, std::string, std::string>> preset_named(
    const std::string& name, const std::optional<std::string>& device) {
  std::vector<std::tuple<std::string, std::string, std::string>> edits;
  for (const auto& edit : detail::op_policy_preset("policies.preset", name,
                                                   parse_optional("policies.preset", device))) {
    edits.emplace_back(edit.op, to_string(edit.policy), edit.device == c10::kCPU ? "cpu" : "cuda");
  }
  return edits;
}

/// torch.OutOfMemoryError, held for good, since torch does not export its own pointer.
PyObject* g_out_of_memory = nullptr;

bool is_type_of_refusals(PyObject* type) {
  const auto is = [type](PyObject* other) { return PyErr_GivenExceptionMatches(type, other) != 0; };
  return !is(g_out_of_memory) &&
         (is(PyExc_RuntimeError) || is(PyExc_TypeError) || is(PyExc_ValueError) ||
          is(PyExc_AssertionError) || is(PyExc_IndexError));
}

/// Whether a Python exception may be an op's refusal of its arguments: not an interrupt, a lack of
/// memory, or one by which code leaves an op, such as checkpoint's recomputation.
bool may_be_refusal(std::exception& error) {
  const pybind11::gil_scoped_acquire gil;
  if (auto* const raised = dynamic_cast<python_error*>(&error)) {
    raised->persist();
    return is_type_of_refusals(raised->type);
  }
  if (const auto* const raised = dynamic_cast<pybind11::error_already_set*>(&error)) {
    return is_type_of_refusals(raised->type().ptr());
  }
  return true;
}

/// The Python function that makes stand-ins, held for good.
PyObject* g_stand_in_maker = nullptr;

at::Tensor stand_in(const at::Tensor& recorded) {
  const pybind11::gil_scoped_acquire gil;
  const auto made = pybind11::handle(g_stand_in_maker)(recorded);
  return made.is_none() ? at::Tensor() : made.cast<at::Tensor>();
}

void set_stand_in_maker(const pybind11::object& maker) {
  g_stand_in_maker = pybind11::object(maker).release().ptr();
  autocast::set_stand_in_maker(stand_in);
}

void add_op(const std::string& name, const std::string& policy,
            const std::optional<std::string>& device) {
  const auto wanted = autocast::policy_named("policies.register_op: expected policy", policy);
  const auto type = parse_optional("policies.register_op", device);
  with_errors_of("register_op", "policies.register_op", [&] { register_op(name, wanted, type); });
}

void remove_op(const std::string& name) {
  with_errors_of("unregister_op", "policies.unregister_op", [&] { unregister_op(name); });
}

}  // namespace

void bind_policy(pybind11::module_& module) {
  module.def("op_policy", torch::wrap_pybind_function(get_policy));
  module.def("set_op_policy", torch::wrap_pybind_function(set_policy));
  module.def("reset_op_policies", torch::wrap_pybind_function(reset_op_policies));
  module.def("op_table", torch::wrap_pybind_function(get_table));
  module.def("register_op", torch::wrap_pybind_function(add_op));
  module.def("unregister_op", torch::wrap_pybind_function(remove_op));
  pybind11::class_<Overrides>(module, "PolicyOverrides").def("__bool__", [](const Overrides& self) {
    return self.value != nullptr;
  });
  module.def("policy_names", autocast::policy_names);
  const auto torch = pybind11::module_::import("torch._C");
  g_out_of_memory = pybind11::object(torch.attr("OutOfMemoryError")).release().ptr();
  autocast::set_refusal_reader(may_be_refusal);
  module.def("set_stand_in_maker", set_stand_in_maker);
  module.def("split_policies", torch::wrap_pybind_function(detail::split_policies));
  module.def("policy_preset", torch::wrap_pybind_function(preset));
  module.def("op_policy_preset", torch::wrap_pybind_function(preset_named));
  module.def("checked_op_policies", torch::wrap_pybind_function(checked_policies));
  module.def("thread_op_policies", [] { return Overrides{detail::thread_op_policies()}; });
  module.def("push_op_policies", [](const Overrides& policies, bool replace) {
    using detail::OverrideMode;
    return detail::push_op_policies(policies.value,
                                    replace ? OverrideMode::kReplace : OverrideMode::kAdd);
  });
  module.def("pop_op_policies", detail::pop_op_policies);
  module.def("run_under_op_policies", run_under);
  module.def("register_kernels", torch::wrap_pybind_function(register_kernels));
  module.def("unregister_kernels", torch::wrap_pybind_function(unregister_kernels));
  module.def("kernels_registered", torch::wrap_pybind_function(kernels_registered));
  module.def("clear_cast_cache", torch::wrap_pybind_function(clear_cast_cache));
}

}  // namespace fastamp::python
