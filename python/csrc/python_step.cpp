// SPDX-License-Identifier: Apache-2.0
#include "python_step.h"

#include "bindings.h"
#include "kernels/functors/noise.h"
#include "scaler/gradient_groups.h"
#include "scaler/gradient_pass.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace fastamp::python {
namespace {

/// Whether element i of both local shards is the same element: a gradient may be sharded otherwise
/// than its parameter, or hold partial sums.
bool same_sharding(PyObject* param, PyObject* grad) {
  static PyObject* spec_key = interned("_spec");
  static PyObject* placements_key = interned("placements");
  static PyObject* mesh_key = interned("mesh");
  const auto spec = attribute(param, spec_key);
  const auto other = attribute(grad, spec_key);
  if (spec.is(other)) {
    return true;
  }
  return attribute(spec.ptr(), placements_key).equal(attribute(other.ptr(), placements_key)) &&
         attribute(spec.ptr(), mesh_key).equal(attribute(other.ptr(), mesh_key));
}

/// The gradients that a pass has listed, for a walk over the parameters that they are listed by.
class ListedGradients {
 public:
  explicit ListedGradients(const scaler::PassResult* pass) {
    if (pass != nullptr) {
      for (const auto& device : pass->devices()) {
        lists_.push_back({&device.seen, 0});
      }
    }
  }

  /// The gradient of a parameter, to be asked for in ascending order; undefined if it has none.
  const at::Tensor& of(std::size_t number) {
    static const at::Tensor none;
    for (auto& [seen, next] : lists_) {
      const auto& gradients = seen->gradients;
      if (next < gradients.size() && seen->positions[next] == number) {
        if (next + kAhead < gradients.size()) {
          const void* ahead = gradients[next + kAhead].unsafeGetTensorImpl();
          __builtin_prefetch(ahead, /*rw=*/1);  // As in prefetch_gradients_after().
          __builtin_prefetch(static_cast<const char*>(ahead) + sizeof(c10::TensorImpl));
        }
        return gradients[next++];
      }
    }
    return none;
  }

 private:
  static constexpr std::size_t kAhead = 6;
  struct List {
    const scaler::DeviceGradients* seen;
    std::size_t next;
  };
  std::vector<List> lists_;
};

struct Walk {
  StepSink& sink;
  KeepAlive& alive;
  ListedGradients* listed;  ///< Null: gradients are read from the parameters.
  bool writes_grads;
  PyObject* group = nullptr;
  std::size_t number = 0;
  bool differentiable = false;
  FusableCheck param_fits{};
  FusableCheck grad_fits{};

  /// False if the parameter needs torch's own step.
  bool take(PyObject* item) {
    if (THPVariable_CheckExact(item)) [[likely]] {
      const auto& param = THPVariable_Unpack(item);
      const auto& grad = listed != nullptr ? listed->of(number) : param.grad();
      if (!grad.defined()) {
        sink.skip(item);
        return true;
      }
      return add(item, param, grad);
    }
    return take_subclass(item);
  }

 private:
  bool add(PyObject* item, const at::Tensor& param, const at::Tensor& grad) {
    if (!grad_fits(grad)) [[unlikely]] {
      if (grad.is_sparse()) {
        sink.check_sparse();
      }
      return false;
    }
    if (differentiable || !param_fits(param)) [[unlikely]] {
      return false;
    }
    alive.hold(item);
    if (!writes_grads && !grad.is_non_overlapping_and_dense() &&
        at::has_internal_overlap(grad) == at::MemOverlap::Yes) [[unlikely]] {
      sink.add({item, param, grad.contiguous(), group, number});
      return true;
    }
    sink.add({item, param, grad, group, number});
    return true;
  }

  // The gradient of a subclass may be a property: Python has to be asked.
  bool take_subclass(PyObject* item) {
    static PyObject* grad_key = interned("grad");
    if (!THPVariable_Check(item)) {
      PyErr_Format(PyExc_TypeError, "step: expected parameters to be torch.Tensor, got %s",
                   Py_TYPE(item)->tp_name);
      throw py::error_already_set();
    }
    const auto grad = attribute(item, grad_key);
    if (grad.is_none()) {
      sink.skip(item);
      return true;
    }
    const auto* local_param = plain_tensor(item);
    const auto* local_grad = THPVariable_Check(grad.ptr()) ? plain_tensor(grad.ptr()) : nullptr;
    if (local_param == nullptr || local_grad == nullptr || Py_TYPE(item) != Py_TYPE(grad.ptr()) ||
        !same_sharding(item, grad.ptr())) {
      if (THPVariable_Unpack(grad.ptr()).is_sparse()) {
        sink.check_sparse();
      }
      return false;
    }
    alive.hold(grad.ptr());
    return add(item, *local_param, *local_grad);
  }
};

}  // namespace

std::int64_t StepParam::noise_origin() const {
  if (THPVariable_CheckExact(object)) [[likely]] {
    return kernels::noise_origin(number);
  }
  const auto first = py::module_::import("fastamp.optim._shards").attr("first_element");
  return kernels::noise_origin(number, first(py::handle(object)).cast<std::uint64_t>());
}

void check_stored(py::handle optimizer, PyObject* group) {
  optimizer.attr("_fastamp_check_stored")("step", py::handle(group));
}

void refuse_stored(py::handle optimizer, PyObject* group) {
  check_stored(optimizer, group);
  throw py::type_error(
      "step: expected options of groups that optimizer._fastamp_check_stored knows");
}

StoredOptions StoredOptions::of(py::handle optimizer, PyObject* group, bool takes_codes) {
  static PyObject* const keys[] = {interned("state_dtype"), interned("state_rounding"),
                                   interned("master")};
  StoredOptions stored;
  bool known = true;
  const auto dtype = optional_item(group, keys[0]);
  if (THPDtype_Check(dtype.ptr())) {
    stored.moments = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    known = stored.moments == at::kFloat || stored.moments == at::kBFloat16;
  } else if (!dtype.is_none()) {
    stored.codes = is_word(dtype, "8bit");
    stored.moments = at::kBFloat16;  // Of what does not fit codes.
    known = stored.codes && takes_codes;
  }
  const auto rounding = optional_item(group, keys[1]);
  const bool nearest = is_word(rounding, "nearest");
  known = known && (nearest || rounding.is_none() || is_word(rounding, "stochastic"));
  stored.noisy = stored.codes || (stored.moments == at::kBFloat16 && !nearest);
  const auto master = optional_item(group, keys[2]);
  stored.remainders = is_word(master, "remainder");
  known = known && (stored.remainders || master.is_none() || is_word(master, "float32"));
  if (!known) [[unlikely]] {
    refuse_stored(optimizer, group);
  }
  return stored;
}

bool StepSink::is_differentiable(PyObject* group) const {
  static PyObject* key = interned("differentiable");
  return group_flag(group, key);
}

py::list gather_step(py::handle optimizer, StepSink& sink, const scaler::PassResult* checked,
                     bool writes_grads, KeepAlive& alive) {
  static PyObject* params_key = interned("params");
  py::list foreign;
  ListedGradients listed(checked);
  Walk walk{.sink = sink,
            .alive = alive,
            .listed = checked == nullptr ? nullptr : &listed,
            .writes_grads = writes_grads};
  const auto groups = as_fast_sequence(optimizer.attr("param_groups"));
  for (Py_ssize_t g = 0; g < PySequence_Fast_GET_SIZE(groups.ptr()); ++g) {
    sink.check_group(PySequence_Fast_GET_ITEM(groups.ptr(), g));
  }
  for (Py_ssize_t g = 0; g < PySequence_Fast_GET_SIZE(groups.ptr()); ++g) {
    const auto group =
        py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(groups.ptr(), g));
    const auto params = as_fast_sequence(group_item(group.ptr(), params_key));
    walk.group = group.ptr();
    walk.differentiable = sink.is_differentiable(group.ptr());
    sink.begin_group(group.ptr(), static_cast<std::size_t>(PySequence_Fast_GET_SIZE(params.ptr())));
    // The sizes are read each time round: Python code called below may change the lists.
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr()); ++i) {
      prefetch_gradients_after(params.ptr(), i, /*gradients=*/checked == nullptr);
      const auto item =
          py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(params.ptr(), i));
      if (!walk.take(item.ptr())) {
        sink.check_foreign(THPVariable_Unpack(item.ptr()));
        foreign.append(py::make_tuple(g, item));
      }
      ++walk.number;
    }
  }
  return foreign;
}

bool StepState::read(PyObject* entry, const StepParam& param, const std::array<Name, kMost>& names,
                     Tensors& tensors) {
  static const at::Tensor undefined;
  if (entry == nullptr || !PyDict_Check(entry)) {
    return false;
  }
  for (std::size_t i = 0; i < kMost; ++i) {
    tensors[i] = &undefined;
    if (names[i].key == nullptr) {
      continue;
    }
    PyObject* object = PyDict_GetItemWithError(entry, names[i].key);
    const auto* tensor =
        object != nullptr && THPVariable_Check(object) ? plain_tensor(object) : nullptr;
    if (tensor == nullptr || tensor->device() != param.param.device()) {
      return false;
    }
    if (tensor->scalar_type() != names[i].dtype) {
      return false;
    }
    tensors[i] = tensor;
    alive_.hold(object);
  }
  return true;
}

StepState::Name StepState::master_of(const StepParam& param, const StoredOptions& stored) {
  static PyObject* const keys[] = {interned("master_remainder"), interned("master_param")};
  if (!param.is_16_bit()) {
    return {};
  }
  return stored.remainders ? Name{keys[0], at::kShort} : Name{keys[1], at::kFloat};
}

StepState::Tensors StepState::of(const StepParam& param, const std::array<Name, kMost>& names) {
  Tensors tensors{};
  if (read(state_.find(param.object), param, names, tensors)) [[likely]] {
    return tensors;
  }
  optimizer_.attr("_fastamp_prepare")(py::handle(param.object), py::handle(param.group));
  if (!read(state_.find(param.object), param, names, tensors)) {
    PyErr_SetString(PyExc_RuntimeError,
                    "step: expected optimizer.state[param] to be a dict that keeps its tensors, "
                    "got one without those that were just stored in it");
    throw py::error_already_set();
  }
  return tensors;
}

StepCopies::StepCopies(py::handle optimizer)
    : holder_(optimizer.attr("_fastamp_weight_copies")),
      options_(holder_.is_none() ? nullptr : holder_.cast<WeightCopyOptions*>()),
      step_(options_ == nullptr ? nullptr : &options_->weight_copies) {}

at::Tensor StepCopies::open(const StepParam& param) {
  // Regions see a DTensor and never its local shard.
  return THPVariable_CheckExact(param.object) ? step_.open(param.param, options_->dtype)
                                              : at::Tensor();
}

bool writes_grads(const optim::AmpStep& amp_step) {
  return amp_step.write_grads && (amp_step.inv_scale || amp_step.clip_coef || amp_step.clip_value);
}

std::shared_ptr<PythonAmpStep> PythonAmpStep::for_device(c10::Device device) {
  for (const auto& [where, copy] : copies_) {
    if (where == device) {
      return copy;
    }
  }
  auto copy = std::make_shared<PythonAmpStep>(optim::amp_step_on(amp_step_, device));
  copies_.emplace_back(device, copy);
  return copy;
}

void bind_amp_step(py::module_& module) {
  using torch::wrap_pybind_function;
  using MaybeTensor = std::optional<at::Tensor>;
  py::class_<PythonAmpStep, std::shared_ptr<PythonAmpStep>>(
      module, "AmpStep",
      "Everything that happens to gradients between backward and an optimizer, and if it steps.")
      .def(
          py::init([](MaybeTensor inv_scale, MaybeTensor clip_coef, MaybeTensor found_inf,
                      std::optional<double> clip_value, bool write_grads) {
            return std::make_shared<PythonAmpStep>(optim::AmpStep{.inv_scale = std::move(inv_scale),
                                                                  .clip_coef = std::move(clip_coef),
                                                                  .found_inf = std::move(found_inf),
                                                                  .clip_value = clip_value,
                                                                  .write_grads = write_grads});
          }),
          py::arg("inv_scale") = py::none(), py::arg("clip_coef") = py::none(),
          py::arg("found_inf") = py::none(), py::arg("clip_value") = py::none(),
          py::arg("write_grads") = true)
      .def_property_readonly("inv_scale",
                             [](const PythonAmpStep& g) { return g.amp_step().inv_scale; })
      .def_property_readonly("clip_coef",
                             [](const PythonAmpStep& g) { return g.amp_step().clip_coef; })
      .def_property_readonly("found_inf",
                             [](const PythonAmpStep& g) { return g.amp_step().found_inf; })
      .def_property_readonly("clip_value",
                             [](const PythonAmpStep& g) { return g.amp_step().clip_value; })
      .def_property_readonly("write_grads",
                             [](const PythonAmpStep& g) { return g.amp_step().write_grads; })
      .def("forget_positions", &PythonAmpStep::forget_positions,
           "Says that code of others runs before the step, which then reads gradients from "
           "parameters and not from the list that was checked.")
      .def("for_device", wrap_pybind_function(&PythonAmpStep::for_device), py::arg("device"));
}

}  // namespace fastamp::python
