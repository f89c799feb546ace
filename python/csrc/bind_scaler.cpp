// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "core/cuda_part.h"
#include "interned.h"
#include "optimizer_objects.h"
#include "python_optimizer.h"
#include "python_step.h"
#include "scaler/scaler_core.h"
#include "scaler/step_logger.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
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
using scaler::Purpose;
using scaler::ScalerCore;
using MaybeTensor = std::optional<at::Tensor>;

/// Values that a captured update will leave at each replay.
struct CapturedOutcomes {
  std::vector<Outcome> outcomes;
};

/// (step, scale, skipped, norm, growth tracker)
using HistoryRow = std::tuple<int64_t, double, bool, double, int64_t>;
/// (position of the parameter, inf, NaN)
using NonFiniteRow = std::tuple<std::size_t, int64_t, int64_t>;

/// (position of the parameter, zeros, elements)
using ZerosRow = std::tuple<std::size_t, int64_t, int64_t>;

double number(py::handle scaler, PyObject* name) {
  const double value = PyFloat_AsDouble(attribute(scaler.ptr(), name).ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return value;
}

std::optional<double> optional_number(py::handle scaler, PyObject* name) {
  return attribute(scaler.ptr(), name).is_none() ? std::nullopt
                                                 : std::optional(number(scaler, name));
}

int64_t integer(py::handle scaler, PyObject* name) {
  const auto value = PyLong_AsLongLong(attribute(scaler.ptr(), name).ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return value;
}

at::Tensor tensor(py::handle scaler, PyObject* name) {
  const auto value = attribute(scaler.ptr(), name);
  return value.is_none() ? at::Tensor() : py::cast<at::Tensor>(value);
}

scaler::ScaleTensors tensors_of(py::handle scaler) {
  PyObject* const keys[] = {interned<"_scale">(), interned<"_growth_tracker">(),
                            interned<"_hysteresis_tracker">(), interned<"_fast_growth_limit">()};
  return {.scale = tensor(scaler, keys[0]),
          .growth_tracker = tensor(scaler, keys[1]),
          .hysteresis_tracker = tensor(scaler, keys[2]),
          .fast_growth_limit = tensor(scaler, keys[3])};
}

scaler::ScaleRules rules_of(py::handle scaler) {
  PyObject* const keys[] = {interned<"_growth_factor">(),       interned<"_backoff_factor">(),
                            interned<"_growth_interval">(),     interned<"_hysteresis">(),
                            interned<"_min_scale">(),           interned<"_max_scale">(),
                            interned<"_fast_growth_interval">()};
  return {.growth_factor = number(scaler, keys[0]),
          .backoff_factor = number(scaler, keys[1]),
          .growth_interval = integer(scaler, keys[2]),
          .hysteresis = integer(scaler, keys[3]),
          .min_scale = optional_number(scaler, keys[4]),
          .max_scale = optional_number(scaler, keys[5]),
          .fast_growth_interval = integer(scaler, keys[6])};
}

/// Calls a function whose refusal is an AssertionError of torch's scaler.
template <typename Function>
auto with_torchs_error(const Function& function) {
  try {
    return function();
  } catch (const scaler::NoGradients& error) {
    PyErr_SetString(PyExc_AssertionError, error.what_without_backtrace());
    throw py::error_already_set();
  }
}

/// ScalerCore for the Python GradScaler: reads the scaler's fields, gathers gradients, calls the
/// core. Used by one thread at a time; its records also by the threads that let go of optimizers,
/// which is guarded by the GIL, or by a critical section of `move_state` in a Python without one.
class PythonScalerCore {
 public:
  /// @param move_state  Called with the key of an optimizer that is gone, and another one: renames
  ///     its entry in the scaler's `_per_optimizer_states`. None: of a guard, which has no entries.
  PythonScalerCore(double init_scale, int64_t history_size, const std::string& device,
                   py::object move_state)
      : core_(std::make_shared<ScalerCore>(init_scale, history_size)),
        device_(c10::Device(device).type()),
        section_(move_state),
        end_([core = std::weak_ptr(core_), move = std::move(move_state)](std::intptr_t key) {
          if (const auto alive = core.lock()) {
            note_end(*alive, key, move);
          }
        }) {}

  /// One that uses the records of another, for the warm-up of a captured step.
  PythonScalerCore(double init_scale, const PythonScalerCore& other)
      : core_(std::make_shared<ScalerCore>(init_scale, *other.core_)),
        device_(other.device_),
        section_(other.section_),
        end_(other.end_) {}

  /// Whether it did: gradients that are tensor subclasses are left to Python, with all others.
  bool unscale(py::handle scaler, py::handle optimizer) {
    auto call = call_on(scaler, optimizer);
    call.forget_if_scaled_anew();
    call.record().pass.reset();  // Its gradients may run code as they go: before any are gathered.
    auto gathered = call.gather(Purpose::kUnscale);
    if (gathered.has_foreign()) {
      return false;
    }
    call.work([&](const auto& data) { core_->unscale(call.record(), std::move(gathered), data); });
    scaler::RecentPasses::get().remember(call.record().pass);
    call.apply_clips();
    return true;
  }

  std::pair<py::dict, Parameters> unscale_grads(py::handle optimizer, const at::Tensor& inv_scale,
                                                const at::Tensor& found_inf, bool allow_fp16,
                                                std::uint64_t times_scaled) {
    const auto record = record_for(optimizer);
    auto gradients = gather(optimizer, allow_fp16 ? Purpose::kCheck : Purpose::kUnscale);
    // A user's _unscale_grads_ may have raised the scaler's own flag before it called this.
    const auto use =
        found_inf.is_same(fresh_flag_) ? scaler::FlagUse::kRaise : scaler::FlagUse::kCopy;
    std::shared_ptr<scaler::PassResult> pass;
    {
      const py::gil_scoped_release no_gil;
      pass = std::make_shared<scaler::PassResult>();
      *pass = scaler::unscale(std::move(gradients.gathered.groups), inv_scale, found_inf,
                              {.flag = use,
                               .buffers = &record->buffers,
                               .ranges = &record->ranges,
                               .step = core_->log().iterations()});
    }
    py::dict flags;
    for (const auto& device : pass->devices()) {
      flags[py::cast(device.seen.device)] = py::cast(device.found_inf);
    }
    scaler::RecentPasses::get().remember(pass);
    core_->note_pass(*record, std::move(pass), {.scale = inv_scale, .times_scaled = times_scaled});
    record->has_foreign = !gradients.foreign.empty();
    return {std::move(flags), std::move(gradients.foreign)};
  }

  void note_foreign_counts(py::handle optimizer, std::vector<std::uint32_t> positions,
                           const at::Tensor& counts) {
    record_for(optimizer)->foreign_counts.push_back(std::make_shared<const scaler::NonFiniteCounts>(
        scaler::NonFiniteCounts{counts.device(), std::move(positions), counts}));
  }

  /// Notes that Python has checked a guarded optimizer's gradients in place.
  /// @param flags  Of each device, as ranks of meshes have agreed on them.
  void note_checked(py::handle optimizer, std::vector<at::Tensor> flags) {
    record_for(optimizer)->progress = {.stage = scaler::Stage::kUnscaled,
                                       .flags = std::move(flags)};
  }

  /// The flags of a guarded optimizer's gradients, until the step ends; none before a check.
  std::vector<at::Tensor> flags(py::handle optimizer) const {
    const auto record = find(optimizer);
    return record == nullptr ? std::vector<at::Tensor>() : record->progress.flags;
  }

  void note_still_scaled(py::handle optimizer, const at::Tensor& scale) {
    const auto record = record_for(optimizer);
    record->norm_factor = core_->scale_history().inv_scale(scale);
    if (record->ranges.step() == core_->log().iterations()) {
      record->ranges.correct(record->norm_factor);
    }
  }

  void apply_clips(py::handle scaler, py::handle optimizer) {
    call_on(scaler, optimizer).apply_clips();
  }

  void agree(py::handle scaler, const py::dict& flags_by_device, const at::Tensor& scale) {
    const auto agreement = agreement_of(scaler);
    std::vector<at::Tensor> flags;
    for (const auto& [device, flag] : flags_by_device) {
      flags.push_back(py::cast<at::Tensor>(flag));
    }
    scaler::agree_on(flags, {.scale = scale, .device = device_, .agreement = &agreement});
    if (flags_by_device.empty()) {
      flags_by_device[py::cast(scale.device())] = py::cast(flags.front());
    }
  }

  at::Tensor new_flag(const at::Tensor& scale) { return fresh_flag_ = scaler::new_flag(scale); }
  at::Tensor inv_scale(const at::Tensor& scale) const {
    return core_->scale_history().inv_scale(scale);
  }

  /// Ends a pass of unscaled gradients ahead of another one; returns the parameters whose gradients
  /// only Python can set to 0, if the pass overflowed.
  Parameters end_pass(py::handle scaler, py::handle optimizer) {
    auto call = call_on(scaler, optimizer);
    auto gradients = gather(optimizer, Purpose::kMultiply);
    call.work(
        [&](const auto& /*data*/) { ScalerCore::end_pass(call.record(), gradients.gathered); });
    return std::move(gradients.foreign);
  }

  bool scaled_anew(py::handle scaler, py::handle optimizer) {
    const auto record = find(optimizer);
    return record != nullptr && OptimizerCall(record, scaler, optimizer, device_).is_scaled_anew();
  }

  /// The norm; None if gradients have to be unscaled first, for clip_norm().
  /// @param is_guard  It is a guard's: as forget_if_edited() first.
  MaybeTensor clip_norm_at_step(py::handle scaler, py::handle optimizer, double max_norm,
                                bool error_if_nonfinite, bool is_guard) {
    if (is_guard) {
      forget_if_edited(scaler, optimizer);
    }
    auto call = call_on(scaler, optimizer);
    if (!call.is_ready()) {
      return std::nullopt;
    }
    call.forget_if_scaled_anew();
    call.record().pass.reset();  // As in unscale().
    auto gathered = call.gather(Purpose::kCheck);
    std::optional<at::Tensor> norm;
    call.work([&](const auto& data) {
      norm = core_->clip_norm_at_step(
          call.record(), std::move(gathered),
          {.max_norm = max_norm, .error_if_nonfinite = error_if_nonfinite}, data);
    });
    return norm && !norm->defined() ? at::zeros({}) : norm;
  }

  /// @param norm_over_ranks  Computes the norm, of gradients on other ranks too; None: it is that
  ///     of the optimizer's own.
  at::Tensor clip_norm(py::handle scaler, py::handle optimizer, double max_norm, double norm_type,
                       bool error_if_nonfinite, bool at_step, const py::object& norm_over_ranks) {
    auto call = call_on(scaler, optimizer);
    if (call.record().clips_at_step()) {
      call.apply_clips();
    }
    const at::NoGradGuard no_grad;
    const auto gradients = gather(optimizer, Purpose::kNorm);
    const auto& groups = gradients.gathered.groups;
    const bool any = !groups.empty() || !gradients.foreign.empty();
    at::Tensor norm;
    if (!norm_over_ranks.is_none()) {
      norm = py::cast<at::Tensor>(norm_over_ranks());
    } else if (any && norm_type == 2.0) {
      const auto dtype = promoted_norm_dtype(groups).value_or(at::kFloat);
      norm = ScalerCore::two_norm(call.record(), gradients.gathered, dtype);
    }
    if (any && !norm.defined()) {
      norm = torchs_norm(gradients, norm_type);
    }
    const auto data = call.data();
    ScalerCore::clip_norm(
        call.record(), gradients.gathered, norm,
        {.max_norm = max_norm, .norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite},
        at_step, &data);
    return norm.defined() ? norm : at::zeros({});
  }

  /// Returns what is left to do with gradients that are not unscaled yet.
  scaler::ClipNext clip_value(py::handle scaler, py::handle optimizer, double clip_value,
                              bool at_step, bool may_check) {
    auto call = call_on(scaler, optimizer);
    const bool ready = call.is_ready();
    if (ready) {
      call.forget_if_scaled_anew();
    }
    while (true) {
      std::optional<scaler::Gathered> gathered;
      if (ready && at_step && may_check) {
        gathered = call.gather(Purpose::kCheck);
      }
      auto next = scaler::ClipNext::kNothing;
      call.work([&](const auto& data) {
        next = core_->clip_value(call.record(), std::move(gathered), clip_value, at_step, data);
      });
      if (ready || next == scaler::ClipNext::kNothing) {
        return next;
      }
      call.apply_clips();
      if (next == scaler::ClipNext::kApply) {
        return scaler::ClipNext::kNothing;
      }
    }
  }

  /// Returns what the optimizer is to be stepped with, and whether a profiler, or another user of
  /// torch's record_function, is to see the step; (None, False) if its gradients have to be
  /// unscaled first.
  /// @param may_check  Gradients may stay scaled until the step.
  /// @param unscaled   They were unscaled because of this step's first call.
  std::pair<std::shared_ptr<PythonAmpStep>, bool> begin_step(py::handle scaler,
                                                             py::handle optimizer,
                                                             bool keep_scaled_grads, bool may_check,
                                                             bool unscaled) {
    auto call = call_on(scaler, optimizer);
    auto& record = call.record();
    bool by_position = false;
    if (call.is_ready() && !unscaled) {
      call.forget_if_scaled_anew();
      if (!may_check || !check(call, by_position)) {
        return {};
      }
      unscaled = true;
    } else if (record.shares_gradients) {
      call.apply_clips();  // In place: the step does not write them.
    }
    try {
      return {std::make_shared<PythonAmpStep>(
                  ScalerCore::begin_step(record, /*was_ready=*/unscaled, keep_scaled_grads),
                  record.pass, by_position),
              at::hasCallbacks()};
    } catch (const scaler::NoGradients&) {
      if (unscaled) {
        call.forget();
      }
      with_torchs_error([] { throw; });
    }
    return {};
  }

  /// Returns what a guarded optimizer is to be stepped with, at a scale of 1, and whether the step
  /// is seen; (None, False) if only Python can check its gradients, which has to be done first.
  /// @param checked  It was.
  /// @param norm     For the spike rule; None: of the pass that checked the gradients.
  /// @param agree    Makes a flag the same on all ranks; None: it is this rank's own.
  std::pair<std::shared_ptr<PythonAmpStep>, bool> begin_unscaled_step(
      py::handle guard, py::handle optimizer, bool checked, std::vector<at::Tensor> not_finite,
      scaler::SpikeRule* spike, const MaybeTensor& norm, const py::object& agree) {
    auto call = call_on(guard, optimizer);
    auto& record = call.record();
    bool by_position = false;
    if (!checked && !is_checked_unscaled(call, by_position)) {
      return {};
    }
    if (record.shares_gradients) {
      call.apply_clips();  // In place: the step does not write them.
    }
    const FlagAgreement agreement = [&agree](const at::Tensor& flag) {
      const py::gil_scoped_acquire gil;
      agree(flag);
    };
    optim::AmpStep amp_step;
    call.work([&](scaler::ScalerCall data) {
      data.agreement = agree.is_none() ? nullptr : &agreement;
      amp_step = ScalerCore::begin_unscaled_step(record,
                                                 {.not_finite = std::move(not_finite),
                                                  .spike = spike,
                                                  .norm = norm.value_or(at::Tensor())},
                                                 data);
    });
    prepare_end(guard, optimizer);
    return {std::make_shared<PythonAmpStep>(std::move(amp_step), record.pass, by_position),
            at::hasCallbacks()};
  }

  /// Checks gradients at a scale of 1, in place where they cannot be checked otherwise; false if
  /// only Python can: of tensor subclasses, and of parameters on meshes, whose ranks have to agree.
  bool check_unscaled(py::handle guard, py::handle optimizer) {
    auto call = call_on(guard, optimizer);
    bool by_position = false;
    return is_checked_unscaled(call, by_position);
  }

  /// Forgets what was put off to a step for gradients that were overwritten since.
  void forget_if_edited(py::handle guard, py::handle optimizer) {
    const auto record = find(optimizer);
    if (record != nullptr && record->pass != nullptr && !record->pass->unchanged()) {
      forget(guard, optimizer);
    }
  }

  /// Forgets what was begun for a step.
  void forget(py::handle guard, py::handle optimizer) {
    const auto call = call_on(guard, optimizer);
    const auto earlier = call.record().start_iteration();
    const auto end = std::exchange(prepared_end_, {});
    call.forget();
  }

  /// Returns whether poll() may have something to report.
  bool end_iteration(py::handle scaler, const MaybeTensor& new_scale, bool capturing) {
    PyObject* const states_key = interned<"_per_optimizer_states">();
    const Locked locked(section_);
    const py::dict states = attribute(scaler.ptr(), states_key);
    scaler::IterationEnd end{.tensors = tensors_of(scaler),
                             .rules = rules_of(scaler),
                             .outcomes = {},
                             .new_scale = new_scale.value_or(at::Tensor()),
                             .capturing = capturing};
    for (const auto& [key, state] : states) {
      Outcome outcome;
      for (const auto& [device, flag] : py::cast<py::dict>(state["found_inf_per_device"])) {
        outcome.flags.push_back(py::cast<at::Tensor>(flag));
      }
      if (outcome.flags.empty()) {
        continue;
      }
      outcome.record = core_->find(py::cast<std::intptr_t>(key));
      if (outcome.record == nullptr) {  // Somebody else has checked its gradients.
        outcome.record = std::make_shared<scaler::OptimizerRecord>();
      }
      outcome.counts = outcome.record->counts();
      end.outcomes.push_back(std::move(outcome));
    }
    with_torchs_error([&] { core_->end_iteration(std::move(end)); });
    return has_news();
  }

  /// Ends a guarded step, as begin_unscaled_step() has prepared it.
  /// @returns None if it had no gradients.
  std::optional<bool> end_step() {
    auto prepared = std::exchange(prepared_end_, {});
    if (!prepared) {
      return std::nullopt;
    }
    const Locked locked(section_);
    core_->end_iteration(*std::move(prepared));
    return has_news();
  }

  /// Takes in what has arrived, or all of it, and gives loggers their rows.
  /// @returns What the user is to be warned of.
  std::optional<std::string> poll(bool wait) {
    core_->log().poll(wait);
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

  /// Calls notify(optimizer or None, step, scale, norm, growth tracker) of skips from now on.
  void notify_skips(const py::object& notify) {
    core_->skip_hooks().add({.callback = [notify](const scaler::Skip& skip) {
      const auto& row = skip.row;
      notify(optimizer_of(*skip.optimizer), row.step, row.scale, row.norm, row.growth_tracker);
    }});
  }

  bool was_skipped(py::handle optimizer) {
    const auto record = find(optimizer);
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
    for (const auto& record : core_->scale_history().history()) {
      rows.emplace_back(record.step, record.scale, record.skipped, record.norm,
                        record.growth_tracker);
    }
    return rows;
  }

  /// (step, scale, (optimizer or None, rows) of each that overflowed) of the last overflow, or of
  /// the iteration that is not over yet if these optimizers of it have overflowed.
  py::object overflow(const std::vector<std::intptr_t>& now) {
    const Locked locked(section_);
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
    const Locked locked(section_);
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

  std::size_t optimizers() const {
    const Locked locked(section_);
    return core_->optimizers();
  }
  double scale() const { return core_->log().scale(); }
  bool skipped() const { return core_->log().skipped(); }
  int64_t skipped_in_a_row() const { return core_->log().skipped_in_a_row(); }

  // For a captured step.
  void prepare(const at::Tensor& scale) {
    core_->scale_history().prepare(scale);
    core_->scale_history().refresh(scale);
  }
  CapturedOutcomes take_captured() { return {core_->take_captured()}; }
  /// Does what end_iteration() does.
  bool note_replay(py::handle scaler, const CapturedOutcomes& captured) {
    core_->note_replay(tensors_of(scaler), captured.outcomes);
    return has_news();
  }

 private:
  /// Makes what the end of a guarded step needs before the step: memory may run out.
  void prepare_end(py::handle guard, py::handle optimizer) {
    PyObject* const keys[] = {interned<"_scale">(), interned<"_growth_tracker">()};
    const scaler::ScaleTensors one{.scale = tensor(guard, keys[0]),
                                   .growth_tracker = tensor(guard, keys[1]),
                                   .hysteresis_tracker = {},
                                   .fast_growth_limit = {}};
    prepared_end_ =
        core_->prepare_unscaled_end(one, find(optimizer), is_captured(one.scale.device()));
  }

  bool has_news() const {
    return core_->log().has_warning() || core_->is_logged() || !core_->skip_hooks().empty();
  }

  /// Returns the optimizer of a record; None if it is gone.
  static py::object optimizer_of(const scaler::OptimizerRecord& record) {
    const auto* const handle = static_cast<const PythonHandle*>(record.handle.get());
    auto optimizer = handle == nullptr ? py::object() : handle->optimizer();
    return optimizer ? optimizer : py::none();
  }

  /// An optimizer is being destroyed. What it did counts until its iteration ends.
  static void note_end(ScalerCore& core, std::intptr_t key, const py::object& move_state) {
    const Locked locked(move_state);
    const auto record = core.find(key);
    const auto free = core.set_aside(key);
    if (!move_state.is_none()) {
      move_state(key, free);
    }
    if (record != nullptr && record->pass != nullptr) {
      const auto pass = record->pass;
      pass->forget();
    }
  }

  scaler::RecordPointer find(py::handle optimizer) const {
    const Locked locked(section_);
    return find_record(*core_, optimizer);
  }
  /// Makes one if there is none.
  scaler::RecordPointer record_for(py::handle optimizer) {
    const Locked locked(section_);
    return record_of(*core_, optimizer, end_);
  }

  OptimizerCall call_on(py::handle scaler, py::handle optimizer) {
    return {record_for(optimizer), scaler, optimizer, device_};
  }

  /// Whether gradients were checked that stay scaled until the step.
  /// @param by_position  Receives Gathered::by_position of them.
  bool check(OptimizerCall& call, bool& by_position) {
    std::optional<bool> checked;
    while (!checked) {
      auto gathered = call.gather(Purpose::kCheck);
      by_position = gathered.by_position;
      call.work([&](const auto& data) {
        checked = core_->check(call.record(), std::move(gathered), data);
      });
    }
    return *checked;
  }

  bool is_checked_unscaled(OptimizerCall& call, bool& by_position) {
    call.forget_if_scaled_anew();
    if (call.is_ready() && check(call, by_position)) {
      return true;
    }
    auto gathered = call.gather(Purpose::kCheck);
    if (gathered.has_foreign()) {
      return false;
    }
    call.work([&](const auto& data) { core_->unscale(call.record(), std::move(gathered), data); });
    return true;
  }

  std::shared_ptr<ScalerCore> core_;
  c10::DeviceType device_;
  py::object section_;
  OptimizerEnd end_;
  at::Tensor fresh_flag_;
  std::optional<ScalerCore::PreparedEnd> prepared_end_;  ///< Of a guarded step that is being made.
};

using Core = PythonScalerCore;

void bind_iterations(py::class_<Core>& type) {
  using torch::wrap_pybind_function;
  type.def("unscale", wrap_pybind_function(&Core::unscale))
      .def("unscale_grads", wrap_pybind_function(&Core::unscale_grads))
      .def("note_foreign_counts", wrap_pybind_function(&Core::note_foreign_counts))
      .def("note_still_scaled", wrap_pybind_function(&Core::note_still_scaled))
      .def("note_checked", wrap_pybind_function(&Core::note_checked))
      .def("flags", wrap_pybind_function(&Core::flags))
      .def("apply_clips", wrap_pybind_function(&Core::apply_clips))
      .def("agree", wrap_pybind_function(&Core::agree))
      .def("new_flag", wrap_pybind_function(&Core::new_flag))
      .def("inv_scale", wrap_pybind_function(&Core::inv_scale))
      .def("end_pass", wrap_pybind_function(&Core::end_pass))
      .def("scaled_anew", wrap_pybind_function(&Core::scaled_anew))
      .def("clip_norm_at_step", wrap_pybind_function(&Core::clip_norm_at_step))
      .def("clip_norm", wrap_pybind_function(&Core::clip_norm))
      .def("clip_value", wrap_pybind_function(&Core::clip_value))
      .def("begin_step", wrap_pybind_function(&Core::begin_step))
      .def("begin_unscaled_step", wrap_pybind_function(&Core::begin_unscaled_step))
      .def("check_unscaled", wrap_pybind_function(&Core::check_unscaled))
      .def("forget_if_edited", wrap_pybind_function(&Core::forget_if_edited))
      .def("forget", wrap_pybind_function(&Core::forget))
      .def("end_step", wrap_pybind_function(&Core::end_step))
      .def("end_iteration", wrap_pybind_function(&Core::end_iteration));
}

void bind_spike_rule(py::module_& module) {
  using torch::wrap_pybind_function;
  using Norms = std::pair<std::vector<double>, int64_t>;
  using scaler::SpikeRule;
  py::class_<SpikeRule>(module, "SpikeRule", "Which gradient norms are far above those before.")
      .def(py::init([](double factor, bool mean, int64_t window) {
             return std::make_unique<SpikeRule>(
                 "StepGuard", SpikeOptions{.factor = factor,
                                           .of = mean ? SpikeOf::kMean : SpikeOf::kMedian,
                                           .window = window});
           }),
           py::arg("factor"), py::arg("mean"), py::arg("window"))
      .def("copy", wrap_pybind_function([](const SpikeRule& rule) { return SpikeRule(rule); }))
      .def("state", wrap_pybind_function([](const SpikeRule& rule) {
             auto state = rule.state();
             return Norms(std::move(state.norms), state.count);
           }))
      .def("load",
           wrap_pybind_function([](SpikeRule& rule, std::vector<double> norms, int64_t count) {
             rule.load("load_state_dict", {.norms = std::move(norms), .count = count});
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
  type.def(py::init<double, int64_t, const std::string&, py::object>(), py::arg("init_scale"),
           py::arg("history_size"), py::arg("device"), py::arg("move_state"))
      .def(py::init<double, const Core&>(), py::arg("init_scale"), py::arg("other"))
      .def_property_readonly("optimizers", &Core::optimizers)
      .def_property_readonly("scale", &Core::scale)
      .def_property_readonly("skipped", &Core::skipped)
      .def_property_readonly("skipped_in_a_row", &Core::skipped_in_a_row)
      .def("log_to", wrap_pybind_function(&Core::log_to))
      .def("notify_skips", wrap_pybind_function(&Core::notify_skips))
      .def("poll", wrap_pybind_function(&Core::poll))
      .def("was_skipped", wrap_pybind_function(&Core::was_skipped))
      .def("load", wrap_pybind_function(&Core::load))
      .def("history", wrap_pybind_function(&Core::history))
      .def("overflow", wrap_pybind_function(&Core::overflow))
      .def("underflows", wrap_pybind_function(&Core::underflows))
      .def("prepare", wrap_pybind_function(&Core::prepare))
      .def("take_captured", wrap_pybind_function(&Core::take_captured))
      .def("note_replay", wrap_pybind_function(&Core::note_replay));
  bind_iterations(type);
  bind_spike_rule(module);
  py::enum_<scaler::ClipNext>(module, "ClipNext", "What is left to do about a clip.")
      .value("NOTHING", scaler::ClipNext::kNothing)
      .value("APPLY", scaler::ClipNext::kApply)
      .value("APPLY_THEN_REPEAT", scaler::ClipNext::kApplyThenRepeat);
  module.def("check_order", wrap_pybind_function([](const std::string& function, int stage) {
               scaler::check_order(function, static_cast<scaler::Stage>(stage));
             }),
             py::arg("function"), py::arg("stage"),
             "Refuses a call on a scaler for an optimizer in a stage, the value of an OptState.");
  module.def("refuse_no_gradients",
             wrap_pybind_function([] { with_torchs_error(scaler::refuse_no_gradients); }),
             "Refuses to step an optimizer without gradients.");
  module.def("flag_for_optimizer",
             wrap_pybind_function([](const std::vector<at::Tensor>& flags, c10::Device device) {
               return scaler::binary_flag(flags, device);
             }),
             py::arg("flags"), py::arg("device"),
             "Returns one flag, exactly 0 or 1, that is raised if any is.");
}

}  // namespace fastamp::python
