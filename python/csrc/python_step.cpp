// SPDX-License-Identifier: Apache-2.0
#include "python_step.h"

#include "bindings.h"
#include "core/dtypes.h"
#include "interned.h"
#include "kernels/functors/noise.h"
#include "optim/encoded_moments.h"
#include "optim/muon_step.h"
#include "optim/step_lists.h"
#include "optimizer_objects.h"
#include "scaler/gradient_groups.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/SafePyObject.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

/// A parameter of a step and what it is looked up by.
struct StepParam {
  PyObject* object;
  const at::Tensor& param;
  const at::Tensor& grad;
  PyObject* group;
  std::size_t number;  ///< Among all parameters of the optimizer, with a gradient or not.

  bool is_16_bit() const { return fastamp::is_16_bit(param); }
  /// kernels::noise_origin() of the parameter, or of the shard that this rank has.
  std::int64_t noise_origin() const {
    if (THPVariable_CheckExact(object)) [[likely]] {
      return kernels::noise_origin(number);
    }
    const auto first = py::module_::import("fastamp.optim._shards").attr("first_element");
    return kernels::noise_origin(number, first(py::handle(object)).cast<std::uint64_t>());
  }
};

// -- what a step keeps for parameters

/// The tensors a step keeps for a parameter, by name; asks the optimizer to create what is missing.
class StepState {
 public:
  struct Name {
    PyObject* key = nullptr;
    at::ScalarType dtype = at::kFloat;
  };
  static constexpr std::size_t kMost = 5;
  using Tensors = std::array<const at::Tensor*, kMost>;

  StepState(py::handle optimizer, KeepAlive& alive)
      : optimizer_(optimizer), state_(optimizer.attr("state")), alive_(alive) {}

  /// The tensors under these names, of these dtypes, undefined ones for null keys.
  /// @throws py::error_already_set  what optimizer._fastamp_prepare raises; RuntimeError if state
  ///     is still missing after it.
  Tensors of(const StepParam& param, const std::array<Name, kMost>& names) {
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
  void skip(PyObject* param) { state_.skip(param); }

  /// Returns what is kept of the master of a parameter, if it has one.
  static Name master_of(const StepParam& param, const StoredOptions& stored) {
    PyObject* const keys[] = {interned<"master_remainder">(), interned<"master_param">()};
    if (!param.is_16_bit()) {
      return {};
    }
    return stored.remainders ? Name{keys[0], at::kShort} : Name{keys[1], at::kFloat};
  }

 private:
  bool read(const py::object& entry, const StepParam& param, const std::array<Name, kMost>& names,
            Tensors& tensors) {
    static const at::Tensor undefined;
    if (!entry || !PyDict_Check(entry.ptr())) {
      return false;
    }
    for (std::size_t i = 0; i < kMost; ++i) {
      tensors[i] = &undefined;
      if (names[i].key == nullptr) {
        continue;
      }
      PyObject* found = nullptr;
      PyDict_GetItemRef(entry.ptr(), names[i].key, &found);
      auto object = py::reinterpret_steal<py::object>(found);
      const auto* tensor =
          object && THPVariable_Check(object.ptr()) ? plain_tensor(object.ptr(), alive_) : nullptr;
      if (tensor == nullptr || tensor->device() != param.param.device() ||
          tensor->scalar_type() != names[i].dtype) {
        return false;
      }
      tensors[i] = tensor;
      alive_.hold(std::move(object));
    }
    return true;
  }

  py::handle optimizer_;
  StateOfParams state_;
  KeepAlive& alive_;
};

/// The weight copies of the parameters of one step.
class StepCopies {
 public:
  explicit StepCopies(py::handle optimizer)
      : holder_(optimizer.attr("_fastamp_weight_copies")),
        options_(holder_.is_none() ? nullptr : holder_.cast<WeightCopyOptions*>()),
        step_(options_ == nullptr ? nullptr : &options_->weight_copies) {}

  /// Gives the parameter that was added last to a step its weight copy, if it has one.
  template <typename Step>
  void add(const StepParam& param, Step& step) {
    if (options_ != nullptr) {
      if (auto weight_copy = open(param); weight_copy.defined()) {
        step.add_copy(param.param, std::move(weight_copy));
      }
    }
  }
  void finish() { step_.finish(); }

 private:
  at::Tensor open(const StepParam& param) {
    // Regions see a DTensor and never its local shard.
    return THPVariable_CheckExact(param.object) ? step_.open(param.param, options_->dtype)
                                                : at::Tensor();
  }

  py::object holder_;  ///< Keeps options_ alive.
  WeightCopyOptions* options_;
  autocast::CopyingStep step_;
};

// -- the walk over parameters

/// Receiver of the groups and parameters that are found, for one kind of optimizer. A class for one
/// has step(), too, which collects them.
class StepSink {
 public:
  /// @param takes_codes  Whether moments of this kind of optimizer may be codes.
  StepSink(py::handle optimizer, KeepAlive& alive, bool takes_codes = false)
      : optimizer_(optimizer),
        takes_codes_(takes_codes),
        state_(optimizer, alive),
        copies_(optimizer) {}
  StepSink(const StepSink&) = delete;
  StepSink& operator=(const StepSink&) = delete;
  virtual ~StepSink() = default;

  /// Refuses values of a group's options that a step does not know: before the first is stepped.
  virtual void check_group(PyObject* group) const { stored_of(group); }
  virtual void begin_group(PyObject* group, std::size_t size) = 0;
  virtual void add(const StepParam& param) = 0;
  /// Whether autograd is to go through the step of a group, which is then torch's.
  virtual bool is_differentiable(PyObject* group) const {
    PyObject* const key = interned<"differentiable">();
    return group_flag(group, key);
  }
  /// Throws what torch throws for a sparse gradient, if it does.
  virtual void check_sparse() const = 0;
  /// Throws what torch's own step throws for a parameter that is left to it, where that is known:
  /// else it would throw when the others have been stepped.
  virtual void check_foreign(const at::Tensor& /*param*/) const {}

  StepState& state() { return state_; }
  StepCopies& copies() { return copies_; }

 protected:
  StoredOptions stored_of(PyObject* group) const {
    return StoredOptions::of(optimizer_, group, takes_codes_);
  }
  py::handle optimizer() const { return optimizer_; }

 private:
  py::handle optimizer_;
  bool takes_codes_;
  StepState state_;
  StepCopies copies_;
};

/// Whether element i of both local shards is the same element: a gradient may be sharded otherwise
/// than its parameter, or hold partial sums.
bool same_sharding(PyObject* param, PyObject* grad) {
  PyObject* const spec_key = interned<"_spec">();
  PyObject* const placements_key = interned<"placements">();
  PyObject* const mesh_key = interned<"mesh">();
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

/// Hands the parameters of one walk to a sink.
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
        sink.state().skip(item);  // Nothing to do, but the state's order goes on.
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
    PyObject* const grad_key = interned<"grad">();
    if (!THPVariable_Check(item)) {
      PyErr_Format(PyExc_TypeError, "step: expected parameters to be torch.Tensor, got %s",
                   Py_TYPE(item)->tp_name);
      throw py::error_already_set();
    }
    const auto grad = attribute(item, grad_key);
    if (grad.is_none()) {
      sink.state().skip(item);
      return true;
    }
    const auto* local_param = plain_tensor(item, alive);
    const auto* local_grad =
        THPVariable_Check(grad.ptr()) ? plain_tensor(grad.ptr(), alive) : nullptr;
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

/// Walks `optimizer.param_groups` and hands every parameter with a gradient to the sink. Nothing is
/// cached between steps: walking costs less than proving that a copy is still right.
///
/// @param checked  Lists the gradients by the position of their parameter: then parameters are not
///     asked for them again. Null: they are.
/// @param writes_grads  Whether the step may write the gradients. Otherwise one that has several
///     elements in one place is read from a copy.
/// @returns (index of group, parameter) of what only torch's own step can do: subclasses other than
///     DTensor, dtypes and layouts without a kernel, differentiable groups. Normally empty.
py::list gather_step(py::handle optimizer, StepSink& sink, const scaler::PassResult* checked,
                     bool writes_grads, KeepAlive& alive) {
  PyObject* const params_key = interned<"params">();
  py::list foreign;
  ListedGradients listed(checked);
  Walk walk{.sink = sink,
            .alive = alive,
            .listed = checked == nullptr ? nullptr : &listed,
            .writes_grads = writes_grads};
  const auto groups = as_fast_sequence(optimizer.attr("param_groups"));
  const Locked locked_groups(groups);
  for (Py_ssize_t g = 0; g < PySequence_Fast_GET_SIZE(groups.ptr()); ++g) {
    sink.check_group(PySequence_Fast_GET_ITEM(groups.ptr(), g));
  }
  for (Py_ssize_t g = 0; g < PySequence_Fast_GET_SIZE(groups.ptr()); ++g) {
    const auto group =
        py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(groups.ptr(), g));
    const auto params = as_fast_sequence(group_item(group.ptr(), params_key));
    const Locked locked_params(params);
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

// -- the step of each optimizer

/// Whether a step can change a gradient.
bool writes_grads(const optim::AmpStep& amp_step) {
  return amp_step.write_grads && (amp_step.inv_scale || amp_step.clip_coef || amp_step.clip_value);
}

/// Steps an optimizer whose parameters a Sink takes.
template <typename Sink>
py::list gathered_step(py::handle optimizer, py::handle amp_step) {
  auto* const given = amp_step.is_none() ? nullptr : py::cast<PythonAmpStep*>(amp_step);
  auto native = given == nullptr ? optim::AmpStep{} : given->amp_step();
  native.write_grads = writes_grads(native);
  const auto checked = given == nullptr ? nullptr : given->take_gradients();
  KeepAlive alive;
  Sink sink(optimizer, alive);
  auto foreign = gather_step(optimizer, sink, checked.get(), native.write_grads, alive);
  {
    const py::gil_scoped_release no_gil;
    sink.step().run(native);
    sink.copies().finish();
  }
  if (given != nullptr) {
    given->end();
  }
  return foreign;
}

class SgdSink final : public StepSink {
 public:
  using StepSink::StepSink;

  void begin_group(PyObject* group, std::size_t size) override {
    PyObject* const keys[] = {interned<"lr">(),        interned<"momentum">(),
                              interned<"dampening">(), interned<"weight_decay">(),
                              interned<"nesterov">(),  interned<"maximize">()};
    optim::SgdGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    options.momentum = group_number(group, keys[1]);
    options.dampening = group_number(group, keys[2]);
    options.weight_decay = group_number(group, keys[3]);
    options.nesterov = group_flag(group, keys[4]);
    options.maximize = group_flag(group, keys[5]);
    moves_ = options.momentum != 0.0;
    stored_ = stored_of(group);
    step_.begin_group(options, size);
  }

  void add(const StepParam& param) override {
    PyObject* const keys[] = {interned<"momentum_buffer">(), interned<"momentum_steps">()};
    static const at::Tensor none;
    if (!moves_ && !param.is_16_bit()) {
      if (step_.add(param.param, param.grad, none, none, none)) {
        copies().add(param, step_);
      }
      return;
    }
    const auto kept = state().of(param, {{{moves_ ? keys[0] : nullptr, stored_.moments},
                                          {moves_ ? keys[1] : nullptr},
                                          StepState::master_of(param, stored_)}});
    const bool noisy = moves_ && stored_.noisy;
    if (step_.add(param.param, param.grad, *kept[0], *kept[1], *kept[2],
                  noisy ? param.noise_origin() : -1)) {
      copies().add(param, step_);
    }
  }

  void check_sparse() const override {}  // torch's own step takes them.

  optim::SgdStep& step() { return step_; }

 private:
  optim::SgdStep step_;
  bool moves_ = false;
  StoredOptions stored_;
};

/// Reads both betas. From 1 on corrections of moments are infinite or negative; torch raises, too.
std::pair<double, double> betas_of(PyObject* group) {
  PyObject* const key = interned<"betas">();
  static constexpr auto* kExpected = "two numbers below 1";
  const auto betas = group_numbers(group, key, kExpected);
  if (betas.size() != 2 || betas[0] >= 1.0 || betas[1] >= 1.0) {
    refuse_option(key, kExpected, group_item(group, key));
  }
  return {betas[0], betas[1]};
}

class AdamSink final : public StepSink {
 public:
  AdamSink(py::handle optimizer, KeepAlive& alive)
      : StepSink(optimizer, alive, /*takes_codes=*/true) {}

  void begin_group(PyObject* group, std::size_t size) override {
    PyObject* const keys[] = {interned<"lr">(),
                              interned<"eps">(),
                              interned<"weight_decay">(),
                              interned<"amsgrad">(),
                              interned<"decoupled_weight_decay">(),
                              interned<"maximize">()};
    optim::AdamGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    std::tie(options.beta1, options.beta2) = betas_of(group);
    options.eps = group_number(group, keys[1]);
    options.weight_decay = group_number(group, keys[2]);
    options.amsgrad = group_flag(group, keys[3]);
    options.decoupled = group_flag(group, keys[4]);
    options.maximize = group_flag(group, keys[5]);
    amsgrad_ = options.amsgrad;
    stored_ = stored_of(group);
    step_.begin_group(options, size);
  }

  void add(const StepParam& param) override {
    PyObject* const keys[] = {interned<"exp_avg">(), interned<"exp_avg_sq">(),
                              interned<"max_exp_avg_sq">(), interned<"step">()};
    const auto moments = stored_.moments;
    if (stored_.codes && !amsgrad_ && fit_codes(param)) {
      add_codes(param);
      return;
    }
    const auto kept = state().of(param, {{{keys[0], moments},
                                          {keys[1], moments},
                                          {amsgrad_ ? keys[2] : nullptr, moments},
                                          {keys[3]},
                                          StepState::master_of(param, stored_)}});
    if (step_.add(param.param, param.grad, *kept[0], *kept[1], *kept[2], *kept[3], *kept[4],
                  stored_.noisy ? param.noise_origin() : -1)) {
      copies().add(param, step_);
    }
  }

  void check_sparse() const override {
    PyErr_SetString(PyExc_RuntimeError,
                    "step: expected dense gradients, got a sparse one: Adam does not support "
                    "sparse gradients, please consider SparseAdam instead");
    throw py::error_already_set();
  }

  optim::AdamStep& step() { return step_; }

 private:
  /// Decides as fastamp.optim._codes.group_of_codes: by the whole shape; a shard is one of rows.
  static bool fit_codes(const StepParam& param) {
    const auto whole = THPVariable_Unpack(param.object).sizes();
    return optim::moment_group(whole) != 0 && param.param.sizes().slice(1) == whole.slice(1);
  }

  void add_codes(const StepParam& param) {
    PyObject* const keys[] = {interned<"exp_avg_8">(), interned<"exp_avg_sq_8">(),
                              interned<"moment_scales_8">(), interned<"step">()};
    const auto kept = state().of(param, {{{keys[0], at::kByte},
                                          {keys[1], at::kByte},
                                          {keys[2], at::kByte},
                                          {keys[3]},
                                          StepState::master_of(param, stored_)}});
    if (step_.add(param.param, param.grad, *kept[0], *kept[1], at::Tensor(), *kept[3], *kept[4],
                  param.noise_origin(), kept[2])) {
      copies().add(param, step_);
    }
  }

  optim::AdamStep step_;
  bool amsgrad_ = false;
  StoredOptions stored_;
};

/// The shards of a DTensor. torch puts them together.
class DTensorShards final : public optim::MuonShards {
 public:
  explicit DTensorShards(PyObject* param) : param_(Py_NewRef(param), getPyInterpreter()) {}

  at::Tensor whole(const at::Tensor& shard) override { return call("gathered", shard); }
  at::Tensor shard(const at::Tensor& whole) override { return call("local_part", whole); }

 private:
  at::Tensor call(const char* function, const at::Tensor& tensor) const {
    const py::gil_scoped_acquire gil;
    const auto shards = py::module_::import("fastamp.optim._shards");
    const auto param = py::reinterpret_borrow<py::object>(param_.ptr(getPyInterpreter()));
    return shards.attr(function)(param, tensor).cast<at::Tensor>();
  }

  c10::SafePyObject param_;  // Let go of where nobody holds the interpreter's lock.
};

std::int64_t steps_of_iteration(PyObject* group, PyObject* key) {
  const auto item = group_item(group, key);
  const auto steps = PyLong_AsLongLong(item.ptr());
  if (steps == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_option(key, "an int", item);
  }
  if (steps >= 100) {
    throw py::value_error("step: expected ns_steps below 100, got " + std::to_string(steps) +
                          ": Number of steps must be less than 100 for computational efficiency");
  }
  return steps;
}

optim::NewtonSchulz iteration_of(py::handle optimizer, PyObject* group) {
  PyObject* const keys[] = {interned<"ns_coefficients">(), interned<"eps">(),
                            interned<"ns_steps">(), interned<"ns_dtype">()};
  const auto numbers = group_numbers(group, keys[0], "three numbers");
  if (numbers.size() != 3) {
    throw py::value_error("step: expected three ns_coefficients, got " +
                          std::to_string(numbers.size()) +
                          ": Coefficients must be a tuple of exactly 3 values");
  }
  optim::NewtonSchulz iteration{numbers[0], numbers[1], numbers[2], group_number(group, keys[1]),
                                steps_of_iteration(group, keys[2])};
  const auto dtype = optional_item(group, keys[3]);
  if (THPDtype_Check(dtype.ptr())) {
    iteration.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  } else if (!dtype.is_none()) {
    refuse_stored(optimizer, group);
  }
  if (iteration.dtype != at::kFloat && !is_16_bit(iteration.dtype)) {
    refuse_stored(optimizer, group);
  }
  return iteration;
}

optim::MuonRate rate_of(py::handle optimizer, PyObject* group) {
  PyObject* const key = interned<"adjust_lr_fn">();
  const auto function = group_item(group, key);
  if (function.is_none() || is_word(function, "original")) {
    return optim::MuonRate::kOriginal;
  }
  if (is_word(function, "match_rms_adamw")) {
    return optim::MuonRate::kMatchRmsAdamW;
  }
  if (!is_word(function, "spectral_unclamped")) {
    refuse_stored(optimizer, group);
  }
  check_stored(optimizer, group);  // Not every torch knows it, and float64 is stepped by torch.
  return optim::MuonRate::kSpectralUnclamped;
}

class MuonSink final : public StepSink {
 public:
  using StepSink::StepSink;

  void check_group(PyObject* group) const override {
    StepSink::check_group(group);
    iteration_of(optimizer(), group);
    rate_of(optimizer(), group);
  }

  void begin_group(PyObject* group, std::size_t /*size*/) override {
    PyObject* const keys[] = {interned<"lr">(), interned<"momentum">(), interned<"weight_decay">(),
                              interned<"nesterov">()};
    optim::MuonGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    options.momentum = group_number(group, keys[1]);
    options.weight_decay = group_number(group, keys[2]);
    options.nesterov = group_flag(group, keys[3]);
    options.rate = rate_of(optimizer(), group);
    options.iteration = iteration_of(optimizer(), group);
    stored_ = stored_of(group);
    step_.begin_group(options);
  }

  void add(const StepParam& param) override {
    PyObject* const keys[] = {interned<"momentum_buffer">(), interned<"momentum_steps">()};
    const auto kept = state().of(param, {{{keys[0], stored_.moments},
                                          StepState::master_of(param, stored_),
                                          {stored_.noisy ? keys[1] : nullptr}}});
    const auto origin = stored_.noisy ? param.noise_origin() : -1;
    bool added = false;
    if (THPVariable_CheckExact(param.object)) [[likely]] {
      added = step_.add(param.param, param.grad, *kept[0], *kept[1], origin, *kept[2]);
    } else {
      const auto shape = py::handle(param.object).attr("shape").cast<std::vector<std::int64_t>>();
      added = step_.add(param.param, param.grad, *kept[0], *kept[1], origin, *kept[2],
                        std::make_shared<DTensorShards>(param.object), shape);
    }
    if (added) {
      copies().add(param, step_);
    }
  }

  bool is_differentiable(PyObject* /*group*/) const override { return false; }  // No such option.

  void check_sparse() const override {
    PyErr_SetString(PyExc_RuntimeError,
                    "step: expected dense gradients, got a sparse one: Muon does not support "
                    "sparse gradients");
    throw py::error_already_set();
  }

  void check_foreign(const at::Tensor& param) const override {
    if (param.is_complex()) {
      PyErr_SetString(PyExc_RuntimeError,
                      "step: expected real parameters, got a complex one: Muon does not support "
                      "complex parameters");
      throw py::error_already_set();
    }
  }

  optim::MuonStep& step() { return step_; }

 private:
  optim::MuonStep step_;
  StoredOptions stored_;
};

}  // namespace

py::list sgd_step(py::handle optimizer, py::handle amp_step) {
  return gathered_step<SgdSink>(optimizer, amp_step);
}

py::list adam_step(py::handle optimizer, py::handle amp_step) {
  return gathered_step<AdamSink>(optimizer, amp_step);
}

py::list muon_step(py::handle optimizer, py::handle amp_step) {
  return gathered_step<MuonSink>(optimizer, amp_step);
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
