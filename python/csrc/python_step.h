// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/dtypes.h"
#include "optim/step_lists.h"
#include "optim/weight_copies.h"
#include "optimizer_objects.h"
#include "scaler/gradient_pass.h"

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Steps of Python's optimizers: the AmpStep that a scaler hands over, and the walk over parameters.
namespace fastamp::python {

/// The Python form of an AmpStep, `fastamp._C.AmpStep`: with its copies on other devices.
class PythonAmpStep {
 public:
  /// @param pass         Over the gradients that the step is for; may be null.
  /// @param by_position  It lists the gradients that the optimizer's parameters have now, each at
  ///     the position of its parameter.
  explicit PythonAmpStep(optim::AmpStep amp_step,
                         std::shared_ptr<scaler::PassResult> pass = nullptr,
                         bool by_position = false)
      : amp_step_(std::move(amp_step)), pass_(std::move(pass)), by_position_(by_position) {}

  const optim::AmpStep& amp_step() const { return amp_step_; }
  /// Returns it with its tensors on a device; one copy per device is kept.
  std::shared_ptr<PythonAmpStep> for_device(c10::Device device);
  /// The pass that lists the gradients of the parameters; null if they are to be read there. The
  /// list is good for one step.
  std::shared_ptr<const scaler::PassResult> take_gradients() {
    return std::exchange(by_position_, false) ? pass_ : nullptr;
  }
  /// Notes that code of others runs before the step, which then reads gradients from parameters.
  void forget_positions() { by_position_ = false; }
  /// Lets the gradients go when they were stepped.
  void end() const {
    if (pass_ != nullptr) {
      pass_->forget();
    }
  }

 private:
  optim::AmpStep amp_step_;
  std::shared_ptr<scaler::PassResult> pass_;
  bool by_position_;
  std::vector<std::pair<c10::Device, std::shared_ptr<PythonAmpStep>>> copies_;
};

/// A parameter of a step and what it is looked up by.
struct StepParam {
  PyObject* object;
  const at::Tensor& param;
  const at::Tensor& grad;
  PyObject* group;
  std::size_t number;  ///< Among all parameters of the optimizer, with a gradient or not.

  bool is_16_bit() const { return fastamp::is_16_bit(param); }
  /// kernels::noise_origin() of the parameter, or of the shard that this rank has.
  std::int64_t noise_origin() const;
};

/// `optimizer._fastamp_weight_copies`: None, or the dtype of its weight copies and what keeps them.
struct WeightCopyOptions {
  explicit WeightCopyOptions(at::ScalarType to) : dtype(to) {}

  at::ScalarType dtype;
  autocast::WeightCopies weight_copies;
};

/// The weight copies of the parameters of one step.
class StepCopies {
 public:
  explicit StepCopies(py::handle optimizer);

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
  at::Tensor open(const StepParam& param);

  py::object holder_;  ///< Keeps options_ alive.
  WeightCopyOptions* options_;
  autocast::CopyingStep step_;
};

/// Reads what the options of a group that torch's groups do not have say of its parameters' state.
struct StoredOptions {
  at::ScalarType moments = at::kFloat;  ///< Dtype of moments that are no codes.
  bool codes = false;                   ///< Moments are codes of 8 bits where they fit.
  bool noisy = false;                   ///< Narrow moments are rounded stochastically.
  bool remainders = false;              ///< Masters are kept as remainders.

  /// The one place where a step learns how state is stored; the state itself does not decide.
  /// @throws py::error_already_set  What check_stored() raises.
  /// @param takes_codes  Whether moments of this kind of optimizer may be codes.
  static StoredOptions of(py::handle optimizer, PyObject* group, bool takes_codes);
};

/// Raises what `optimizer._fastamp_check_stored` raises for a group with a value that there is not.
void check_stored(py::handle optimizer, PyObject* group);
/// Throws for a group with a value that C++ does not know.
[[noreturn]] void refuse_stored(py::handle optimizer, PyObject* group);

/// Receiver of the groups and parameters that are found, for one kind of optimizer.
class StepSink {
 public:
  explicit StepSink(py::handle optimizer, bool takes_codes = false)
      : optimizer_(optimizer), takes_codes_(takes_codes) {}
  StepSink(const StepSink&) = delete;
  StepSink& operator=(const StepSink&) = delete;
  virtual ~StepSink() = default;

  /// Refuses values of a group's options that a step does not know: before the first is stepped.
  virtual void check_group(PyObject* group) const { stored_of(group); }
  virtual void begin_group(PyObject* group, std::size_t size) = 0;
  virtual void add(const StepParam& param) = 0;
  /// Whether autograd is to go through the step of a group, which is then torch's.
  virtual bool is_differentiable(PyObject* group) const;
  /// No gradient: nothing to do, but the state's order goes on.
  virtual void skip(PyObject* param) = 0;
  /// Throws what torch throws for a sparse gradient, if it does.
  virtual void check_sparse() const = 0;
  /// Throws what torch's own step throws for a parameter that is left to it, where that is known:
  /// else it would throw when the others have been stepped.
  virtual void check_foreign(const at::Tensor& /*param*/) const {}

 protected:
  StoredOptions stored_of(PyObject* group) const {
    return StoredOptions::of(optimizer_, group, takes_codes_);
  }
  py::handle optimizer() const { return optimizer_; }

 private:
  py::handle optimizer_;
  bool takes_codes_;
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
                     bool writes_grads, KeepAlive& alive);

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
  Tensors of(const StepParam& param, const std::array<Name, kMost>& names);
  void skip(PyObject* param) { state_.skip(param); }

  /// Returns what is kept of the master of a parameter, if it has one.
  static Name master_of(const StepParam& param, const StoredOptions& stored);

 private:
  bool read(PyObject* entry, const StepParam& param, const std::array<Name, kMost>& names,
            Tensors& tensors);

  py::handle optimizer_;
  StateOfParams state_;
  KeepAlive& alive_;
};

/// Whether a step can change a gradient.
bool writes_grads(const optim::AmpStep& amp_step);

/// Holds what sgd_step and adam_step have in common. A Sink also has run(amp_step), which
/// releases the GIL.
template <typename Sink>
py::list gathered_step(py::handle optimizer, py::handle amp_step) {
  auto* const given = amp_step.is_none() ? nullptr : py::cast<PythonAmpStep*>(amp_step);
  auto native = given == nullptr ? optim::AmpStep{} : given->amp_step();
  native.write_grads = writes_grads(native);
  const auto checked = given == nullptr ? nullptr : given->take_gradients();
  KeepAlive alive;
  Sink sink(optimizer, alive);
  auto foreign = gather_step(optimizer, sink, checked.get(), native.write_grads, alive);
  sink.run(native);
  if (given != nullptr) {
    given->end();
  }
  return foreign;
}

}  // namespace fastamp::python
