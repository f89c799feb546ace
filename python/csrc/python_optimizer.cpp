// SPDX-License-Identifier: Apache-2.0
#include "python_optimizer.h"

#include "core/tensor_kind.h"
#include "interned.h"
#include "optimizer_objects.h"
#include "scaler/scale_ops.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

namespace fastamp::python {
namespace {

using scaler::OptimizerRecord;
using scaler::Stage;

PythonHandle& handle_of(const OptimizerRecord& record) {
  return static_cast<PythonHandle&>(*record.handle);
}

/// A member of torch's OptState; torch keeps it for good.
PyObject* opt_state(Stage stage) {
  // No initializers: Python code runs meanwhile, and another thread that came here with the GIL
  // would wait for a guard that is never released.
  static std::array<std::atomic<PyObject*>, 3> known{};
  static constexpr std::array kNames{"READY", "UNSCALED", "STEPPED"};
  const auto index = static_cast<std::size_t>(stage);
  PyObject* state = known.at(index).load(std::memory_order_acquire);
  if (state == nullptr) {
    const auto states = py::module_::import("torch.amp.grad_scaler").attr("OptState");
    state = states.attr(kNames.at(index)).ptr();
    known.at(index).store(state, std::memory_order_release);
  }
  return state;
}

/// Borrowed; null if it is not there.
PyObject* item(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

void set_item(PyObject* dict, PyObject* key, PyObject* value) {
  if (PyDict_SetItem(dict, key, value) != 0) {
    throw py::error_already_set();
  }
}

// torch makes the entries of `_per_optimizer_states` anew in each iteration: a dictionary with
// another one of a tensor and its device. To create and destroy them takes a fifth of the time of
// a short pass. So the last entry is kept, and used again if nobody else has it, or a part of it.

/// Whether nobody else has the entry any more, and all that is in it will be overwritten.
bool is_spare_entry(const py::object& entry) {
  return entry && PyUnstable_Object_IsUniquelyReferenced(entry.ptr()) != 0 &&
         PyDict_Size(entry.ptr()) == 2;
}

/// The dictionary of flags in an entry, borrowed; null without one.
PyObject* flags_in(const py::object& entry) {
  PyObject* const flags = entry ? item(entry.ptr(), interned<"found_inf_per_device">()) : nullptr;
  return flags != nullptr && PyDict_CheckExact(flags) ? flags : nullptr;
}

/// The (device, flag) of a dictionary of one flag, borrowed; nulls if it is none.
std::pair<PyObject*, PyObject*> only_flag(PyObject* flags) {
  PyObject* device = nullptr;
  PyObject* flag = nullptr;
  Py_ssize_t position = 0;
  if (flags == nullptr || PyDict_Size(flags) != 1 ||
      PyDict_Next(flags, &position, &device, &flag) == 0 || !THPDevice_Check(device) ||
      !THPVariable_Check(flag)) {
    return {};
  }
  return {device, flag};
}

/// The flag of a spare entry if nobody else has it; else undefined.
at::Tensor spare_flag(const py::object& entry, const at::Tensor& scale) {
  PyObject* const flags = is_spare_entry(entry) ? flags_in(entry) : nullptr;
  PyObject* const flag = only_flag(flags).second;
  const bool spare = flag != nullptr && PyUnstable_Object_IsUniquelyReferenced(flags) != 0 &&
                     PyUnstable_Object_IsUniquelyReferenced(flag) != 0 &&
                     scaler::is_spare_flag(THPVariable_Unpack(flag), scale);
  return spare ? THPVariable_Unpack(flag) : at::Tensor();
}

/// Whether a dictionary of flags says what a new one of these would.
bool holds_flags(PyObject* dict, const std::vector<at::Tensor>& flags) {
  const auto [device, flag] =
      flags.size() == 1 ? only_flag(dict) : std::pair<PyObject*, PyObject*>();
  return flag != nullptr && THPVariable_Unpack(flag).is_same(flags.front()) &&
         reinterpret_cast<THPDevice*>(device)->device == flags.front().device();
}

/// The flags as torch keeps them, by device: in the dictionary of the entry if that holds them.
py::object flags_by_device(const py::object& entry, const std::vector<at::Tensor>& flags) {
  if (PyObject* const kept = flags_in(entry); holds_flags(kept, flags)) {
    return py::reinterpret_borrow<py::object>(kept);
  }
  py::dict by_device;
  for (const auto& flag : flags) {
    by_device[py::cast(flag.device())] = py::cast(flag);
  }
  return by_device;
}

bool same_progress(const scaler::Progress& a, const scaler::Progress& b) {
  return a.stage == b.stage &&
         std::ranges::equal(a.flags, b.flags,
                            [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

/// Python's part in what C++ cannot do with gradients.
py::object python_function(const char* name) {
  return py::module_::import("fastamp._scaler.gradients").attr(name);
}

/// Whether parameters are laid out on meshes, whose ranks have to agree, also those that have no
/// gradients.
bool is_laid_out(py::handle optimizer) {
  return !py::dict(python_function("meshes_of")(optimizer)).empty();
}

/// An object to be let go of by whoever has it last, with or without the GIL.
std::shared_ptr<Parameters> shared(Parameters parameters) {
  return {new Parameters(std::move(parameters)), [](const Parameters* last) {
            const py::gil_scoped_acquire gil;
            delete last;
          }};
}

using Taken = scaler::GradientGroups::Taken;

// Lists, tuples and dicts themselves are read without running Python code.
bool is_plain_sequence(PyObject* params) {
  return PyList_CheckExact(params) || PyTuple_CheckExact(params);
}

py::object get_params(PyObject* group) {
  PyObject* const key = interned<"params">();
  PyObject* params = PyObject_GetItem(group, key);
  if (params == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(params);
}

// For subclasses of Parameter or Tensor: `grad` may be a property, so Python has to be asked.
void add_subclass(PyObject* item, scaler::GradientGroups& groups, Parameters& foreign) {
  groups.give_up_addresses();  // Python code is called next.
  const auto parameter = py::reinterpret_borrow<py::object>(item);
  if (!THPVariable_Check(item)) {
    PyErr_Format(PyExc_AssertionError, "unscale_: expected param to be torch.Tensor, got %s",
                 Py_TYPE(item)->tp_name);
    throw py::error_already_set();
  }
  const py::object gradient = parameter.attr("grad");
  if (gradient.is_none()) {
    groups.skip();
    return;
  }
  const auto& tensor = THPVariable_Unpack(gradient.ptr());
  if (tensor.is_sparse()) {  // Replacing it must go through the property as well.
    groups.skip();
    foreign.push_back(parameter);
  } else if (groups.add(THPVariable_Unpack(item), tensor) == Taken::kForeign) {
    foreign.push_back(parameter);
  }
}

py::object param_groups_of(py::handle optimizer) {
  PyObject* const key = interned<"param_groups">();
  return as_fast_sequence(optimizer.attr(py::handle(key)));
}

using Block = std::array<c10::TensorImpl*, scaler::GradientGroups::kBlock>;

// The parameters from item `first` on, up to a subclass or the end of the block.
std::size_t take_plain(PyObject* sequence, Py_ssize_t first, Block& block) {
  const auto left = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence) - first);
  PyObject** const items = PySequence_Fast_ITEMS(sequence) + first;
  for (auto i = block.size(); i < std::min(2 * block.size(), left); ++i) {
    __builtin_prefetch(items[i]);  // For the next block.
  }
  std::size_t count = 0;
  for (; count < std::min(block.size(), left) && THPVariable_CheckExact(items[count]); ++count) {
    block.at(count) = THPVariable_Unpack(items[count]).unsafeGetTensorImpl();
    __builtin_prefetch(block.at(count));
  }
  return count;
}

/// Gathers the gradients of all groups of an optimizer, as gather_group() those of one.
bool gather_gradients(py::handle optimizer, scaler::GradientGroups& groups, Parameters& foreign) {
  bool any_subclass = false;
  const auto param_groups = param_groups_of(optimizer);
  const Locked locked(param_groups);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(param_groups.ptr()); ++i) {
    if (!PyDict_CheckExact(PySequence_Fast_GET_ITEM(param_groups.ptr(), i))) {
      groups.give_up_addresses();
    }
    any_subclass |=
        gather_group(get_params(PySequence_Fast_GET_ITEM(param_groups.ptr(), i)), groups, foreign);
  }
  return any_subclass;
}

}  // namespace

py::object PythonHandle::optimizer() const {
  if (PyWeakref_Check(reference.ptr()) == 0) {
    return reference;
  }
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference.ptr(), &found);
  return py::reinterpret_steal<py::object>(found);
}

std::intptr_t key_of(py::handle optimizer) {
  return reinterpret_cast<std::intptr_t>(optimizer.ptr());
}

scaler::RecordPointer find_record(const scaler::ScalerCore& core, py::handle optimizer) {
  auto record = core.find(key_of(optimizer));
  return record != nullptr && handle_of(*record).optimizer().is(optimizer) ? record : nullptr;
}

scaler::RecordPointer record_of(scaler::ScalerCore& core, py::handle optimizer,
                                const OptimizerEnd& end) {
  if (auto record = find_record(core, optimizer)) [[likely]] {
    return record;
  }
  const auto key = key_of(optimizer);
  core.set_aside(key);
  auto handle = std::make_unique<PythonHandle>();
  const py::cpp_function callback([end, key](const py::handle& /*reference*/) { end(key); });
  PyObject* reference = PyWeakref_NewRef(optimizer.ptr(), callback.ptr());
  if (reference != nullptr) {
    handle->reference = py::reinterpret_steal<py::object>(reference);
  } else {  // A class with __slots__ and no __weakref__.
    PyErr_Clear();
    handle->reference = py::reinterpret_borrow<py::object>(optimizer);
  }
  return core.add(key, std::move(handle));
}

bool gather_group(const py::object& params, scaler::GradientGroups& groups, Parameters& foreign) {
  bool any_subclass = false;
  if (!is_plain_sequence(params.ptr())) {
    groups.give_up_addresses();
  }
  const auto sequence = as_fast_sequence(params);
  const Locked locked(sequence);
  groups.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr())));
  Block block{};
  // The size is read each time round: Python code called below may change the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr());) {
    if (const auto count = take_plain(sequence.ptr(), i, block); count > 0) {
      const auto foreign_ones = groups.add_block({block.data(), count});
      for (std::size_t k = 0; foreign_ones != 0 && k < count; ++k) {
        if ((foreign_ones >> k & 1U) != 0) {
          foreign.push_back(py::reinterpret_borrow<py::object>(
              PySequence_Fast_GET_ITEM(sequence.ptr(), i + static_cast<Py_ssize_t>(k))));
        }
      }
      i += static_cast<Py_ssize_t>(count);
    } else {
      add_subclass(PySequence_Fast_GET_ITEM(sequence.ptr(), i++), groups, foreign);
      any_subclass = true;
    }
  }
  return any_subclass;
}

bool for_each_plain(py::handle optimizer, const VisitGradient& visit) {
  for (const auto& group : param_groups_of(optimizer)) {
    for (const auto& item : as_fast_sequence(get_params(group.ptr()))) {
      if (!THPVariable_CheckExact(item.ptr())) {
        return false;
      }
      const auto& gradient = gradient_of(item.ptr());
      if (gradient.defined() && !visit(THPVariable_Unpack(item.ptr()), gradient)) {
        return false;
      }
    }
  }
  return true;
}

bool may_share_gradients(py::handle optimizer) {
  std::unordered_map<const void*, const void*> owners;
  return !for_each_plain(optimizer, [&](const at::Tensor& parameter, const at::Tensor& gradient) {
    const void* const owner = parameter.unsafeGetTensorImpl();
    return owners.try_emplace(gradient.unsafeGetTensorImpl(), owner).first->second == owner;
  });
}

PythonGradients gather(py::handle optimizer, scaler::Purpose purpose) {
  scaler::GradientGroups groups(purpose);
  PythonGradients gradients;
  const bool any_subclass = gather_gradients(optimizer, groups, gradients.foreign);
  auto& gathered = gradients.gathered;
  gathered.by_position = groups.by_position();
  if (groups.any_repeats()) {
    groups.give_up_addresses();  // Python code may be called next.
    gathered.shared = may_share_gradients(optimizer);
  }
  gathered.groups = groups.release();
  const bool before_pass =
      purpose == scaler::Purpose::kUnscale || purpose == scaler::Purpose::kCheck;
  if (!gradients.foreign.empty() || (any_subclass && before_pass && is_laid_out(optimizer))) {
    gathered.multiply_foreign = [foreign = shared(gradients.foreign)](const at::Tensor& factor) {
      const py::gil_scoped_acquire gil;
      python_function("multiply_subclasses")(*foreign, factor);
    };
  }
  return gradients;
}

at::Tensor torchs_norm(const PythonGradients& gradients, double norm_type) {
  py::list plain;
  for (const auto& group : gradients.gathered.groups) {
    for (const auto& gradient : group.gradients) {
      plain.append(py::cast(gradient));
    }
  }
  return python_function("norm_with_subclasses")(plain, gradients.foreign, norm_type)
      .cast<at::Tensor>();
}

FlagAgreement agreement_of(py::handle scaler) {
  PyObject* const key = interned<"process_group">();
  if (attribute(scaler.ptr(), key).is_none()) {
    return nullptr;
  }
  return [scaler](const at::Tensor& flag) {
    const py::gil_scoped_acquire gil;
    scaler.attr("_agree_on")(flag);
  };
}

OptimizerCall::OptimizerCall(scaler::RecordPointer record, py::handle scaler, py::handle optimizer,
                             c10::DeviceType device)
    : record_(std::move(record)),
      optimizer_(optimizer),
      key_(key_of(optimizer)),
      device_(device),
      agreement_(agreement_of(scaler)) {
  PyObject* const keys[] = {interned<"_scale">(), interned<"_per_optimizer_states">(),
                            interned<"_times_scaled">()};
  scale_ = attribute(scaler.ptr(), keys[0]);
  TORCH_CHECK_TYPE(THPVariable_Check(scale_.ptr()),
                   "GradScaler: expected a scale that is a torch.Tensor, got ",
                   Py_TYPE(scale_.ptr())->tp_name);
  states_ = attribute(scaler.ptr(), keys[1]);
  times_scaled_ = py::cast<std::uint64_t>(attribute(scaler.ptr(), keys[2]));
  if (states_.is_none()) {
    known_ = record_->progress;
    return;
  }
  if (PyObject* const own = state()) {
    PyObject* const stage = item(own, interned<"stage">());
    for (const auto reached : {Stage::kUnscaled, Stage::kStepped}) {
      known_.stage = stage == opt_state(reached) ? reached : known_.stage;
    }
    if (PyObject* const flags = item(own, interned<"found_inf_per_device">())) {
      for (const auto& [where, flag] : py::reinterpret_borrow<py::dict>(flags)) {
        known_.flags.push_back(py::cast<at::Tensor>(flag));
      }
    }
  }
  record_->progress = known_;
}

const at::Tensor& OptimizerCall::scale() const { return THPVariable_Unpack(scale_.ptr()); }

scaler::ScalerCall OptimizerCall::data() const {
  return {.scale = scale(),
          .times_scaled = times_scaled_,
          .device = device_,
          .agreement = agreement_ ? &agreement_ : nullptr,
          .spare_flag = spare_flag(handle_of(*record_).entry, scale())};
}

// False too if that is not known: of subclasses, whose gradient is a property, and of sparse ones,
// which clipping replaces by their sums.
bool OptimizerCall::is_scaled_anew() const {
  if (!scaler::ScalerCore::may_be_scaled_anew(*record_, times_scaled_)) {
    return false;
  }
  bool any = false;
  const bool all =
      for_each_plain(optimizer_, [&](const at::Tensor& /*parameter*/, const at::Tensor& gradient) {
        any = true;
        return !gradient.is_sparse() && !record_->pass->saw(gradient);
      });
  return any && all;
}

void OptimizerCall::forget_if_scaled_anew() const {
  if (is_scaled_anew()) {
    const auto earlier = record_->start_iteration();
  }
}

PyObject* OptimizerCall::state() const {
  return states_.is_none() ? nullptr : item(states_.ptr(), key_.ptr());
}

void OptimizerCall::write_progress() {
  const auto& [stage, flags] = record_->progress;
  if (same_progress(record_->progress, known_)) {
    return;
  }
  auto& kept = handle_of(*record_).entry;
  auto own = py::reinterpret_borrow<py::object>(state());
  const bool is_new = !own;
  if (is_new) {
    own = is_spare_entry(kept) ? kept : py::dict();
  }
  set_item(own.ptr(), interned<"stage">(), opt_state(stage));
  set_item(own.ptr(), interned<"found_inf_per_device">(), flags_by_device(kept, flags).ptr());
  if (is_new && !states_.is_none()) {
    set_item(states_.ptr(), key_.ptr(), own.ptr());
  }
  kept = std::move(own);
}

void OptimizerCall::work(c10::function_ref<void(const scaler::ScalerCall&)> function) {
  const auto given = data();
  try {
    const py::gil_scoped_release no_gil;
    function(given);
  } catch (...) {
    write_progress();
    throw;
  }
  write_progress();
}

void OptimizerCall::apply_clips() const {
  if (!record_->clips_at_step()) [[likely]] {
    return;
  }
  const at::NoGradGuard no_grad;
  if (const auto coefficient = record_->clip_coef; coefficient.defined()) {
    scaler::ScalerCore::multiply(gather(scaler::Purpose::kMultiply), coefficient);
    record_->clip_coef = at::Tensor();
  }
  if (const auto clip_value = record_->clip_value) {
    python_function("clip_values")(optimizer_, *clip_value);
    record_->clip_value.reset();
  }
}

void OptimizerCall::forget() const {
  if (state() != nullptr && PyDict_DelItem(states_.ptr(), key_.ptr()) != 0) {
    throw py::error_already_set();
  }
}

std::optional<at::ScalarType> promoted_norm_dtype(
    const std::vector<scaler::DeviceGradients>& groups) {
  std::optional<at::ScalarType> dtype;
  for (const auto& group : groups) {
    for (const auto& gradient : group.gradients) {
      const auto own = gradient.scalar_type();
      if (!at::isFloatingType(own) || !has_geometry(gradient)) {
        return std::nullopt;
      }
      dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
    }
  }
  return dtype;
}

}  // namespace fastamp::python
