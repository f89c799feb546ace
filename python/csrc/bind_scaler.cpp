// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "python_optimizer.h"
#include "recent_passes.h"
#include "scaler/scaler_core.h"
#include "scaler/step_logger.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

using scaler::Outcome;
using scaler::ScalerCall;
using scaler::ScalerCore;
using MaybeTensor = std::optional<at::Tensor>;

/// What a captured update will leave at each replay.
struct CapturedOutcomes {
  std::vector<Outcome> outcomes;
};

/// (step, scale, skipped, norm, growth tracker)
using HistoryRow = std::tuple<int64_t, double, bool, double, int64_t>;
/// (position of the parameter, inf, NaN)
using NonFiniteRow = std::tuple<std::size_t, int64_t, int64_t>;

/// (position of the parameter, zeros, elements)
using ZerosRow = std::tuple<std::size_t, int64_t, int64_t>;

/// The tensors and dictionary that a scaler lends for one call.
struct Loan {
  at::Tensor scale;
  py::dict states;
  std::uint64_t times_scaled;
  bool agrees;
};

/// ScalerCore for the Python GradScaler. Guarded by the GIL.
class PythonScalerCore {
 public:
  PythonScalerCore(double init_scale, int64_t history_size, std::string device, py::object hooks)
      : core_(std::make_shared<ScalerCore>(init_scale, history_size)),
        device_(std::move(device)),
        hooks_(std::move(hooks)),
        agreement_(all_reduce_of(hooks_)),
        end_([core = std::weak_ptr(core_), hooks = hooks_](std::intptr_t key) {
          if (const auto alive = core.lock()) {
            note_end(*alive, key, hooks);
          }
        }) {}

  /// One that uses the records of another, for the warm-up of a captured step.
  PythonScalerCore(double init_scale, const PythonScalerCore& other, py::object hooks)
      : core_(std::make_shared<ScalerCore>(init_scale, *other.core_)),
        device_(other.device_),
        hooks_(std::move(hooks)),
        agreement_(all_reduce_of(hooks_)),
        end_(other.end_) {}

  bool unscale(py::handle optimizer, const Loan& loan) {
    auto port = port_of(optimizer, loan.states);
    if (!core_->unscale(port, call(loan))) {
      return false;
    }
    ScalerCore::apply_clips(port, core_->record_of(port));
    return true;
  }

  std::pair<py::dict, Parameters> unscale_grads(py::handle optimizer, const at::Tensor& inv_scale,
                                                const at::Tensor& found_inf, bool allow_fp16,
                                                std::uint64_t times_scaled) {
    auto port = port_of(optimizer, py::dict());
    const auto record = core_->record_of(port);
    scaler::GradientGroups groups(allow_fp16, scaler::Use::kPassNext);
    auto foreign = gather_gradients(optimizer, groups);
    // A user's _unscale_grads_ may have raised the scaler's own flag before it called this.
    const auto use =
        found_inf.is_same(fresh_flag_) ? scaler::FlagUse::kRaise : scaler::FlagUse::kCopy;
    std::shared_ptr<scaler::PassResult> pass;
    port.run([&] {
      pass = std::make_shared<scaler::PassResult>(
          scaler::unscale(groups.release(), inv_scale, found_inf,
                          {.flag = use,
                           .buffers = &record->buffers,
                           .ranges = &record->ranges,
                           .step = core_->log().iterations()}));
    });
    py::dict flags;
    for (const auto& device : pass->devices()) {
      flags[py::cast(device.seen.device)] = py::cast(device.found_inf);
    }
    port.unscaled_by(pass);
    core_->note_pass(*record, std::move(pass), {.scale = inv_scale, .times_scaled = times_scaled});
    record->has_foreign = !foreign.empty();
    return {std::move(flags), std::move(foreign)};
  }

  void note_foreign_counts(py::handle optimizer, std::vector<std::uint32_t> positions,
                           const at::Tensor& counts) {
    auto port = port_of(optimizer, py::dict());
    core_->record_of(port)->foreign_counts.push_back(
        std::make_shared<const scaler::NonFiniteCounts>(
            scaler::NonFiniteCounts{counts.device(), std::move(positions), counts}));
  }

  void note_still_scaled(py::handle optimizer, const at::Tensor& scale) {
    auto port = port_of(optimizer, py::dict());
    const auto record = core_->record_of(port);
    record->norm_factor = core_->sidecar().inv_scale(scale);
    if (record->ranges.step() == core_->log().iterations()) {
      record->ranges.correct(record->norm_factor);
    }
  }

  void apply_clips(py::handle optimizer, py::dict states) {
    auto port = port_of(optimizer, std::move(states));
    ScalerCore::apply_clips(port, core_->record_of(port));
  }

  void agree(const py::dict& flags_by_device, const at::Tensor& scale) {
    std::vector<at::Tensor> flags;
    for (const auto& [device, flag] : flags_by_device) {
      flags.push_back(py::cast<at::Tensor>(flag));
    }
    scaler::agree_on(flags, call({scale, py::dict(), 0, true}));
    if (flags_by_device.empty()) {
      flags_by_device[py::cast(scale.device())] = py::cast(flags.front());
    }
  }

  at::Tensor new_flag(const at::Tensor& scale) { return fresh_flag_ = scaler::new_flag(scale); }
  at::Tensor inv_scale(const at::Tensor& scale) const { return core_->sidecar().inv_scale(scale); }

  bool scaled_anew(py::handle optimizer, std::uint64_t times_scaled) {
    const auto port = port_of(optimizer, py::dict());
    const auto record = core_->find(port);
    return record != nullptr &&
           ScalerCore::scaled_anew(port, *record, {.scale = {}, .times_scaled = times_scaled});
  }

  MaybeTensor clip_norm(py::handle optimizer, const Loan& loan, double max_norm, double norm_type,
                        bool error_if_nonfinite, bool may_put_off, bool may_check,
                        const py::object& norm_over_ranks) {
    auto port = port_of(optimizer, loan.states);
    if (!may_check) {
      port.forbid_checks();
    }
    ScalerCore::NormClip clip{
        .max_norm = max_norm, .norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite};
    if (!norm_over_ranks.is_none()) {
      clip.norm_over_ranks = [&] { return py::cast<at::Tensor>(norm_over_ranks()); };
    }
    const auto norm = core_->clip_norm(port, call(loan), clip, may_put_off);
    return norm.defined() ? MaybeTensor(norm) : std::nullopt;
  }

  void clip_value(py::handle optimizer, const Loan& loan, double clip_value, bool may_put_off,
                  bool may_check) {
    auto port = port_of(optimizer, loan.states);
    if (!may_check) {
      port.forbid_checks();
    }
    core_->clip_value(port, call(loan), clip_value, may_put_off);
  }

  /// (whether the step was called, what it returned)
  std::pair<bool, py::object> step(py::handle optimizer, const Loan& loan, py::tuple args,
                                   py::dict kwargs, bool keep_scaled_grads, bool may_check) {
    auto port = port_of(optimizer, loan.states);
    if (!may_check) {
      port.forbid_checks();
    }
    port.set_step_arguments(std::move(args), std::move(kwargs));
    const bool called = core_->step(port, call(loan), keep_scaled_grads);
    return {called, port.take_result()};
  }

  /// Returns whether settle() may have something to tell.
  bool end_iteration(const py::dict& states, const at::Tensor& scale,
                     const at::Tensor& growth_tracker, const MaybeTensor& hysteresis_tracker,
                     const MaybeTensor& fast_growth_limit, const scaler::ScaleRules& rules,
                     const MaybeTensor& new_scale, bool capturing) {
    std::vector<Outcome> outcomes;
    for (const auto& [key, state] : states) {
      Outcome outcome;
      outcome.record = core_->find(py::cast<std::intptr_t>(key));
      for (const auto& [device, flag] : py::cast<py::dict>(state["found_inf_per_device"])) {
        outcome.flags.push_back(py::cast<at::Tensor>(flag));
      }
      if (outcome.record == nullptr) {  // Somebody else has checked its gradients.
        outcome.record = std::make_shared<scaler::OptimizerRecord>();
      }
      if (!outcome.flags.empty()) {
        outcome.counts = outcome.record->counts();
        outcomes.push_back(std::move(outcome));
      }
    }
    scaler::ScaleTensors tensors{scale, growth_tracker, hysteresis_tracker.value_or(at::Tensor()),
                                 fast_growth_limit.value_or(at::Tensor())};
    core_->end_iteration(tensors, rules, outcomes, new_scale.value_or(at::Tensor()), capturing);
    return has_news();
  }

  /// Takes in what has arrived, or all of it, and gives loggers their rows.
  /// @returns What the user is to be warned of.
  std::optional<std::string> settle(bool wait) {
    core_->log().settle(wait);
    core_->pass_rows_on();
    return core_->log().take_warning();
  }

  /// @param callback  Called with step, scale, skipped, norm, overflows, underflows or None, casts
  ///     and their bytes.
  std::shared_ptr<scaler::StepLogger> log_to(const py::function& callback, bool casts) {
    auto logger = std::make_shared<scaler::StepLogger>(
        [callback](const LoggedStep& row) {
          callback(row.step, row.scale, row.skipped, row.norm, row.overflows, row.underflows,
                   row.casts.casts(), row.casts.cast_bytes);
        },
        casts);
    core_->log_to(logger);
    return logger;
  }

  /// Calls hooks.tell_skip(optimizer or None, step, scale, norm, growth tracker) of skips from now
  /// on.
  void tell_skips() {
    core_->skip_hooks().add({.callback = [hooks = hooks_](const scaler::Skip& skip) {
      const auto& row = skip.row;
      hooks.attr("tell_skip")(optimizer_of(*skip.optimizer), row.step, row.scale, row.norm,
                              row.growth_tracker);
    }});
  }

  bool was_skipped(py::handle optimizer) {
    const auto record = core_->find(port_of(optimizer, py::dict()));
    return record != nullptr && record->skipped;
  }

  void load(double scale, const std::vector<HistoryRow>& rows, int64_t skipped_in_a_row) {
    std::vector<StepRecord> history;
    history.reserve(rows.size());
    for (const auto& [step, row_scale, skipped, norm, tracker] : rows) {
      history.push_back({.step = step,
                         .scale = row_scale,
                         .skipped = skipped,
                         .norm = norm,
                         .growth_tracker = tracker});
    }
    core_->load(scale, std::move(history), skipped_in_a_row);
  }

  std::vector<HistoryRow> history() const {
    std::vector<HistoryRow> rows;
    for (const auto& record : core_->sidecar().history()) {
      rows.emplace_back(record.step, record.scale, record.skipped, record.norm,
                        record.growth_tracker);
    }
    return rows;
  }

  /// (step, scale, (optimizer or None, rows) of each that overflowed) of the last overflow, or of
  /// the iteration that is not over yet if these optimizers of it have overflowed.
  py::object overflow(const std::vector<std::intptr_t>& now) {
    scaler::IterationLog::Overflow found;
    for (const auto key : now) {
      if (const auto record = core_->find(key)) {
        found.optimizers.emplace_back(record, record->counts());
      }
    }
    if (!found.optimizers.empty()) {
      found.step = core_->log().iterations();
      found.scale = core_->log().scale();
    } else if (const auto& last = core_->log().overflow()) {
      found = *last;
    } else {
      return py::none();
    }
    py::list optimizers;
    for (const auto& [record, counts] : found.optimizers) {
      std::vector<NonFiniteRow> rows;
      for (const auto& [position, elements] : scaler::read_counts(counts)) {
        rows.emplace_back(position, elements.inf, elements.nan);
      }
      optimizers.append(py::make_tuple(optimizer_of(*record), rows));
    }
    return py::make_tuple(found.step, found.scale, optimizers);
  }

  /// (step, scale, range, (optimizer or None, rows) of each) of the gradients counted last.
  py::object underflows() const {
    const auto records = core_->records_counted_last();
    if (records.empty()) {
      return py::none();
    }
    UnderflowReport report;
    py::list optimizers;
    for (const auto& record : records) {
      const auto counts = record->ranges.read();
      report.step = record->ranges.step();
      report.scale = counts.scale;
      report.range += counts.range;
      report.elements += counts.elements;
      std::vector<ZerosRow> rows;
      for (const auto& [position, counted] : counts.zeros) {
        if (counted.zeros != 0) {
          rows.emplace_back(position, counted.zeros, counted.elements);
        }
      }
      optimizers.append(py::make_tuple(optimizer_of(*record), rows));
    }
    return py::make_tuple(std::move(report), optimizers);
  }

  std::size_t optimizers() const { return core_->optimizers(); }
  double scale() const { return core_->log().scale(); }
  bool skipped() const { return core_->log().skipped(); }
  int64_t skipped_in_a_row() const { return core_->log().skipped_in_a_row(); }

  // For a captured step.
  void prepare(const at::Tensor& scale) {
    core_->sidecar().prepare(scale);
    core_->sidecar().refresh(scale);
  }
  CapturedOutcomes take_captured() { return {core_->take_captured()}; }
  /// As end_iteration().
  bool note_replay(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const MaybeTensor& hysteresis_tracker, const MaybeTensor& fast_growth_limit,
                   const CapturedOutcomes& captured) {
    core_->note_replay({scale, growth_tracker, hysteresis_tracker.value_or(at::Tensor()),
                        fast_growth_limit.value_or(at::Tensor())},
                       captured.outcomes);
    return has_news();
  }

 private:
  bool has_news() const {
    return core_->log().has_warning() || core_->is_logged() || !core_->skip_hooks().empty();
  }

  /// None if it is gone.
  static py::object optimizer_of(const scaler::OptimizerRecord& record) {
    const auto* const handle = static_cast<const PythonHandle*>(record.handle.get());
    PyObject* const optimizer = handle == nullptr ? nullptr : handle->optimizer();
    return optimizer == nullptr ? py::none() : py::reinterpret_borrow<py::object>(optimizer);
  }

  static FlagAgreement all_reduce_of(const py::object& hooks) {
    return [hooks](const at::Tensor& flag) { hooks.attr("all_reduce")(flag); };
  }

  /// An optimizer is being destroyed. What it did counts until its iteration ends.
  static void note_end(ScalerCore& core, std::intptr_t key, const py::object& hooks) {
    const auto record = core.find(key);
    hooks.attr("move_state")(key, core.set_aside(key));
    if (record != nullptr && record->pass != nullptr) {
      const auto pass = record->pass;
      pass->forget();
    }
  }

  ScalerCall call(const Loan& loan) const {
    return {.scale = loan.scale,
            .times_scaled = loan.times_scaled,
            .device = loan.agrees ? c10::Device(device_).type() : c10::kCUDA,
            .agreement = loan.agrees ? &agreement_ : nullptr};
  }

  PythonOptimizer port_of(py::handle optimizer, py::dict states) {
    return {optimizer, std::move(states), hooks_, end_};
  }

  std::shared_ptr<ScalerCore> core_;
  std::string device_;
  py::object hooks_;
  FlagAgreement agreement_;
  OptimizerEnd end_;
  at::Tensor fresh_flag_;
};

using Core = PythonScalerCore;

/// The arguments that a method which takes a Loan begins with.
template <typename... More, typename Method>
auto with_loan(Method method) {
  return torch::wrap_pybind_function([method](Core& core, py::handle optimizer, at::Tensor scale,
                                              py::dict states, std::uint64_t times_scaled,
                                              bool agrees, More... more) {
    return (core.*method)(optimizer, {std::move(scale), std::move(states), times_scaled, agrees},
                          std::forward<More>(more)...);
  });
}

void bind_iterations(py::class_<Core>& type) {
  using torch::wrap_pybind_function;
  type.def("unscale", with_loan<>(&Core::unscale))
      .def("unscale_grads", wrap_pybind_function(&Core::unscale_grads))
      .def("note_foreign_counts", wrap_pybind_function(&Core::note_foreign_counts))
      .def("note_still_scaled", wrap_pybind_function(&Core::note_still_scaled))
      .def("apply_clips", wrap_pybind_function(&Core::apply_clips))
      .def("agree", wrap_pybind_function(&Core::agree))
      .def("new_flag", wrap_pybind_function(&Core::new_flag))
      .def("inv_scale", wrap_pybind_function(&Core::inv_scale))
      .def("scaled_anew", wrap_pybind_function(&Core::scaled_anew))
      .def("clip_norm",
           with_loan<double, double, bool, bool, bool, const py::object&>(&Core::clip_norm))
      .def("clip_value", with_loan<double, bool, bool>(&Core::clip_value))
      .def("step", with_loan<py::tuple, py::dict, bool, bool>(&Core::step))
      .def("end_iteration",
           wrap_pybind_function(
               [](Core& core, const py::dict& states, const at::Tensor& scale,
                  const at::Tensor& growth_tracker, const MaybeTensor& hysteresis_tracker,
                  const MaybeTensor& fast_growth_limit, double growth_factor, double backoff_factor,
                  int64_t growth_interval, int64_t hysteresis, std::optional<double> min_scale,
                  std::optional<double> max_scale, int64_t fast_growth_interval,
                  const MaybeTensor& new_scale, bool capturing) {
                 return core.end_iteration(states, scale, growth_tracker, hysteresis_tracker,
                                           fast_growth_limit,
                                           {growth_factor, backoff_factor, growth_interval,
                                            hysteresis, min_scale, max_scale, fast_growth_interval},
                                           new_scale, capturing);
               }));
}

}  // namespace

void bind_scaler(py::module_& module) {
  using torch::wrap_pybind_function;
  const py::class_<CapturedOutcomes> captured(module, "CapturedOutcomes");
  py::class_<scaler::StepLogger, std::shared_ptr<scaler::StepLogger>>(module, "StepLogger")
      .def("pass_on", wrap_pybind_function(&scaler::StepLogger::pass_on))
      .def("drop", wrap_pybind_function(&scaler::StepLogger::drop));
  py::class_<Core> type(module, "ScalerCore", "The iterations of a gradient scaler.");
  type.def(py::init<double, int64_t, std::string, py::object>(), py::arg("init_scale"),
           py::arg("history_size"), py::arg("device"), py::arg("hooks"))
      .def(py::init<double, const Core&, py::object>(), py::arg("init_scale"), py::arg("other"),
           py::arg("hooks"))
      .def_property_readonly("optimizers", &Core::optimizers)
      .def_property_readonly("scale", &Core::scale)
      .def_property_readonly("skipped", &Core::skipped)
      .def_property_readonly("skipped_in_a_row", &Core::skipped_in_a_row)
      .def("log_to", wrap_pybind_function(&Core::log_to))
      .def("tell_skips", wrap_pybind_function(&Core::tell_skips))
      .def("settle", wrap_pybind_function(&Core::settle))
      .def("was_skipped", wrap_pybind_function(&Core::was_skipped))
      .def("load", wrap_pybind_function(&Core::load))
      .def("history", wrap_pybind_function(&Core::history))
      .def("overflow", wrap_pybind_function(&Core::overflow))
      .def("underflows", wrap_pybind_function(&Core::underflows))
      .def("prepare", wrap_pybind_function(&Core::prepare))
      .def("take_captured", wrap_pybind_function(&Core::take_captured))
      .def("note_replay", wrap_pybind_function(&Core::note_replay));
  bind_iterations(type);
  module.def("flag_for_optimizer",
             wrap_pybind_function([](const std::vector<at::Tensor>& flags, c10::Device device) {
               return scaler::binary_flag(flags, device);
             }),
             py::arg("flags"), py::arg("device"),
             "Returns one flag, exactly 0 or 1, that is raised if any is.");
}

}  // namespace fastamp::python
