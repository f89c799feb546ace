// SPDX-License-Identifier: Apache-2.0
#include "region_init.h"

#include "autocast/torch_state.h"
#include "float8/recipe.h"
#include "region_hooks.h"
#include "region_object.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>

#include <array>
#include <atomic>
#include <optional>
#include <string_view>

namespace fastamp::python {
namespace {

/// Pairs (device, dtype) that torch's checks have let through already. They depend on the machine
/// alone.
std::array<std::array<std::atomic<bool>, 2>, 2> g_checked{};

std::atomic<bool>* checked_flag(c10::DeviceType device, c10::ScalarType dtype) {
  const bool known_device = device == c10::kCPU || device == c10::kCUDA;
  const bool known_dtype = dtype == c10::kHalf || dtype == c10::kBFloat16;
  if (!known_device || !known_dtype) {
    return nullptr;
  }
  return &g_checked[device == c10::kCUDA ? 1 : 0][dtype == c10::kHalf ? 1 : 0];
}

struct Arguments {
  PyObject* device = nullptr;
  PyObject* dtype = Py_None;
  PyObject* enabled = Py_True;
  PyObject* cache_enabled = Py_None;
};

/// False, without an error set, if the call is unusual in any way: Python code then finds out what
/// is wrong with it.
bool read_arguments(PyObject* args, PyObject* kwargs, Arguments& out) {
  const std::array<PyObject**, 4> slots{&out.device, &out.dtype, &out.enabled, &out.cache_enabled};
  const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
  if (count > slots.size()) {
    return false;
  }
  for (std::size_t i = 0; i < count; ++i) {
    *slots[i] = PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i));
  }
  constexpr std::array<std::string_view, 4> kNames{"device_type", "dtype", "enabled",
                                                   "cache_enabled"};
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value) != 0) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(key, &length);
    std::size_t i = count;
    while (i < kNames.size() &&
           kNames[i] != std::string_view(text, static_cast<std::size_t>(length))) {
      ++i;
    }
    if (i == kNames.size()) {
      return false;
    }
    *slots[i] = value;
  }
  return true;
}

std::optional<c10::DeviceType> plain_device(PyObject* device) {
  if (device != nullptr && PyUnicode_CheckExact(device)) {
    if (PyUnicode_CompareWithASCIIString(device, "cuda") == 0) {
      return c10::kCUDA;
    }
    if (PyUnicode_CompareWithASCIIString(device, "cpu") == 0) {
      return c10::kCPU;
    }
  }
  return std::nullopt;
}

/// Sets up the region if its arguments are ordinary and known to pass torch's checks.
bool init_fast(Region* self, const Arguments& arguments) {
  const auto device = plain_device(arguments.device);
  const bool ordinary =
      device.has_value() && PyBool_Check(arguments.enabled) != 0 &&
      (arguments.dtype == Py_None || THPDtype_Check(arguments.dtype)) &&
      (arguments.cache_enabled == Py_None || PyBool_Check(arguments.cache_enabled) != 0);
  if (!ordinary) {
    return false;
  }
  PyObject* dtype =
      arguments.dtype == Py_None
          ? reinterpret_cast<PyObject*>(torch::getTHPDtype(autocast::region_dtype(*device)))
          : arguments.dtype;
  const auto scalar_type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  const auto* checked = checked_flag(*device, scalar_type);
  if (checked == nullptr ||
      (arguments.enabled == Py_True && !checked->load(std::memory_order_relaxed))) {
    return false;
  }
  self->wanted = {.device = *device,
                  .dtype = scalar_type,
                  .enabled = arguments.enabled == Py_True,
                  .cache_enabled = arguments.cache_enabled == Py_None
                                       ? autocast::is_weight_cache_enabled()
                                       : arguments.cache_enabled == Py_True,
                  .sets_float8 = arguments.dtype != Py_None,
                  .float8 = nullptr};
  replace_reference(self->device, arguments.device);
  replace_reference(self->fast_dtype, dtype);
  return true;
}

/// @param gives_dtype  Whether the call names a dtype, which ends an fp8 recipe.
int init_checked(PyObject* self, PyObject* args, PyObject* kwargs, bool gives_dtype) {
  PyObject* with_self = PyTuple_New(PyTuple_GET_SIZE(args) + 1);
  if (with_self == nullptr) {
    return -1;
  }
  Py_INCREF(self);
  PyTuple_SET_ITEM(with_self, 0, self);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* item = PyTuple_GET_ITEM(args, i);
    Py_INCREF(item);
    PyTuple_SET_ITEM(with_self, i + 1, item);
  }
  PyObject* result = PyObject_Call(g_region_hooks.checked_init, with_self, kwargs);
  Py_DECREF(with_self);
  if (result == nullptr) {
    return -1;
  }
  Py_DECREF(result);
  as_region(self)->wanted.sets_float8 = gives_dtype;
  as_region(self)->wanted.float8 = nullptr;
  // torch looks for a GPU at "cuda" but not at "cuda:0": a plain name is about the
  // machine.
  const Region* region = as_region(self);
  auto* checked = checked_flag(region->wanted.device, region->wanted.dtype);
  if (checked != nullptr && region->wanted.enabled && plain_device(region->device).has_value()) {
    checked->store(true, std::memory_order_relaxed);
  }
  return 0;
}

bool is_float8_dtype(PyObject* dtype) {
  return THPDtype_Check(dtype) &&
         c10::isFloat8Type(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
}

bool refuses_float8(PyObject* kwargs) {
  return kwargs != nullptr && PyDict_GetItemString(kwargs, "float8") == Py_False;
}

/// A region with an fp8 recipe: torch's checks are those of a region of its base dtype.
int init_float8(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* resolved = PyObject_Call(g_region_hooks.float8_arguments, args, kwargs);
  if (resolved == nullptr) {
    return -1;
  }
  PyObject* base_dtype_args = nullptr;
  unsigned number = 0;
  int result = -1;
  if (PyArg_ParseTuple(resolved, "OI", &base_dtype_args, &number) != 0) {
    result = init_checked(self, base_dtype_args, nullptr, /*gives_dtype=*/true);
  }
  if (result == 0) {
    auto& wanted = as_region(self)->wanted;
    wanted.float8 = refuses_float8(kwargs) ? autocast::no_float8(wanted.device)
                                           : autocast::float8_setting_numbered(number);
  }
  Py_DECREF(resolved);
  return result;
}

}  // namespace

int region_init(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  Arguments arguments;
  const bool is_readable = read_arguments(args, kwargs, arguments);
  if (is_readable && init_fast(as_region(self), arguments)) {
    return 0;
  }
  if (is_float8_dtype(arguments.dtype) ||
      (kwargs != nullptr && PyDict_GetItemString(kwargs, "float8") != nullptr)) {
    return init_float8(self, args, kwargs);
  }
  return init_checked(self, args, kwargs, is_readable && arguments.dtype != Py_None);
  END_HANDLE_TH_ERRORS_RET(-1)
}

}  // namespace fastamp::python
