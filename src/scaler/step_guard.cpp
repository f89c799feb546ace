// SPDX-License-Identifier: Apache-2.0
#include "core/device_copy.h"
#include "optim/torch_step.h"
#include "scaler/libtorch_optimizer.h"
#include "scaler/past_archive.h"
#include "scaler/scale_checks.h"
#include "scaler/skip_callback.h"
#include "scaler/step_guard_impl.h"

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>

#include <utility>

namespace fastamp {

using scaler::OptimizerRecord;
using scaler::Purpose;
using scaler::Stage;
using torch::optim::Optimizer;
using PreparedEnd = scaler::ScalerCore::PreparedEnd;

namespace {

constexpr const char* kLoad = "StepGuard::load";

c10::Device device_of(const Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      return parameter.device();
    }
  }
  return c10::kCPU;
}

}  // namespace

StepGuard::Impl::Impl(Optimizer& given, const StepGuardOptions& wanted)
    : optimizer(given), options(wanted), core(1.0, wanted.history_size()) {
  TORCH_CHECK_VALUE(dynamic_cast<torch::optim::LBFGS*>(&given) == nullptr,
                    "StepGuard: expected an optimizer whose step evaluates gradients once, got an "
                    "LBFGS");
  TORCH_CHECK_VALUE(wanted.max_consecutive().value_or(0) >= 0,
                    "StepGuard: expected max_consecutive >= 0, got ",
                    wanted.max_consecutive().value_or(0));
  scaler::check_history_size("StepGuard", wanted.history_size());
  if (wanted.spike()) {
    spike.emplace("StepGuard", *wanted.spike());
  }
}

scaler::ScalerCall StepGuard::Impl::call(bool agrees) const {
  return {.scale = one.scale,
          .times_scaled = calls,
          .device = one.scale.device().type(),
          .agreement = agrees && options.agreement() ? &options.agreement() : nullptr,
          .keeps_flag = true};
}

scaler::RecordPointer StepGuard::Impl::begin() {
  if (!one.scale.defined()) {
    const c10::InferenceMode normal_mode(false);
    const auto device = device_of(optimizer);
    scaler::ScaleTensors made;
    made.scale = at::ones({}, at::TensorOptions(at::kFloat).device(device));
    made.growth_tracker = at::zeros({}, at::TensorOptions(at::kInt).device(device));
    one = std::move(made);
  }
  ++calls;
  auto record = scaler::record_of(core, optimizer);
  if (record->progress.stage == Stage::kUnscaled ||
      scaler::is_scaled_anew(optimizer, *record, call())) {
    const auto earlier = record->start_iteration();
  }
  return record;
}

void StepGuard::Impl::check(OptimizerRecord& record) {
  std::optional<bool> checked = false;
  if (!scaler::has_sparse(optimizer)) {
    do {
      checked = core.check(record, scaler::gather(optimizer, record, Purpose::kCheck), call());
    } while (!checked);
  }
  if (!*checked) {
    core.unscale(record, scaler::gather(optimizer, record, Purpose::kCheck), call());
  }
}

std::optional<at::Tensor> StepGuard::Impl::step_checked(OptimizerRecord& record,
                                                        std::optional<PreparedEnd>& end) {
  check(record);
  if (record.progress.stage == Stage::kUnscaled) {
    scaler::apply_clips(optimizer, record);
  }
  const auto amp_step = scaler::ScalerCore::begin_unscaled_step(
      record, {.not_finite = losses, .spike = spike ? &*spike : nullptr, .norm = {}},
      call(/*agrees=*/true));
  end = core.prepare_unscaled_end(one, scaler::find_record(core, optimizer), /*capturing=*/false);
  if (scaler::supports_amp_step(optimizer, /*fuse=*/false)) {
    return scaler::step_with(optimizer, amp_step);
  }
  if (optim::is_skipped(amp_step)) {
    return std::nullopt;
  }
  scaler::apply_clips(optimizer, record);
  return scaler::call_step(optimizer);
}

at::Tensor StepGuard::Impl::clip_norm(OptimizerRecord& record, const scaler::NormClip& clip) {
  if (record.pass != nullptr && !record.pass->unchanged()) {
    const auto earlier = record.start_iteration();  // Gradients are new ones, in the same memory.
  }
  const bool at_step = !scaler::has_sparse(optimizer);
  if (at_step && clip.norm_type == 2.0 && record.pass == nullptr) {
    auto gathered = scaler::gather(optimizer, record, Purpose::kCheck);
    if (auto norm = core.clip_norm_at_step(record, std::move(gathered), clip,
                                           call(clip.error_if_nonfinite))) {
      return *norm;
    }
  }
  scaler::apply_clips(optimizer, record);
  check(record);
  const auto now = call(clip.error_if_nonfinite);
  return scaler::clip_unscaled(optimizer, record, clip, at_step, &now);
}

void StepGuard::Impl::end(OptimizerRecord& record, std::optional<PreparedEnd> end) {
  if (!end) {  // There were no gradients.
    const auto earlier = record.start_iteration();
    return;
  }
  core.end_iteration(*std::move(end));
  core.log().poll_if_possible(/*wait=*/core.skip_hooks().waits());
  report_news();
  refuse_more_skips();
}

void StepGuard::Impl::poll(bool wait) {
  core.log().poll(wait);
  report_news();
}

void StepGuard::Impl::report_news() {
  if (core.log().take_warning()) {
    TORCH_WARN("StepGuard: ", core.log().skipped_in_a_row(),
               " steps in a row were skipped. Look at overflow_report(model->named_parameters()) "
               "for the parameters concerned, at the loss and the inputs of that step for NaN, and "
               "at history() for when it began.");
  }
  core.pass_rows_on();
}

void StepGuard::Impl::refuse_more_skips() {
  const auto most = options.max_consecutive();
  const auto skips = core.log().skipped_in_a_row();
  const auto& overflow = core.log().overflow();
  if (most && overflow && skips > *most) {
    const auto report = scaler::named_report(*overflow, {}).str();
    TORCH_CHECK(false, "step: expected at most ", *most, " skipped steps in a row, got ", skips,
                ". ", report);
  }
}

StepGuard::StepGuard(Optimizer& optimizer, const StepGuardOptions& options)
    : impl_(std::make_unique<Impl>(optimizer, options)) {
  if (options.on_skip()) {
    register_on_skip(options.on_skip());
  }
}
StepGuard::~StepGuard() = default;

std::optional<at::Tensor> StepGuard::step(const Optimizer::LossClosure& closure) {
  std::optional<at::Tensor> loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  const auto record = impl_->begin();
  std::optional<at::Tensor> result;
  std::optional<PreparedEnd> end;
  auto spike = impl_->spike;
  try {
    result = impl_->step_checked(*record, end);
  } catch (...) {
    impl_->spike.swap(spike);  // A step that was not made has no norm.
    // A clip that was put off counts for the step that is made instead, if that has the gradients.
    if (record->pass == nullptr || !record->pass->unchanged()) {
      const auto earlier = record->start_iteration();
    }
    throw;
  }
  const auto losses = std::exchange(impl_->losses, {});
  impl_->end(*record, std::move(end));
  return loss ? loss : result;
}

at::Tensor StepGuard::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  const auto record = impl_->begin();
  const auto norm = impl_->clip_norm(
      *record,
      {.max_norm = max_norm, .norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite});
  return norm.defined() ? norm : at::zeros({});
}

void StepGuard::check_loss(const at::Tensor& loss) {
  TORCH_CHECK_VALUE(loss.defined(), "check_loss: expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(loss.numel() == 1 && loss.is_floating_point(),
                    "check_loss: expected a loss of one element and a floating dtype, got ",
                    loss.scalar_type(), " of shape ", loss.sizes());
  impl_->losses.push_back(loss.detach());
}

bool StepGuard::step_was_skipped() {
  impl_->poll(/*wait=*/true);
  return impl_->core.log().skipped();
}

std::int64_t StepGuard::skipped_in_a_row() {
  impl_->poll(/*wait=*/true);
  return impl_->core.log().skipped_in_a_row();
}

OverflowReport StepGuard::overflow_report(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  impl_->poll(/*wait=*/true);
  const auto& overflow = impl_->core.log().overflow();
  return overflow ? scaler::named_report(*overflow, scaler::names_by_identity(named_parameters))
                  : impl_->loaded_report;
}

std::vector<StepRecord> StepGuard::history() const { return impl_->core.scale_history().history(); }

SkipHandle StepGuard::register_on_skip(SkipCallback callback, bool wait) {
  return SkipHandle(impl_->core.skip_hooks().add(scaler::skip_hook(std::move(callback), wait)));
}

StepGuardState StepGuard::state() {
  StepGuardState result;
  result.overflow_report = overflow_report();
  result.history = history();
  result.skipped_in_a_row = impl_->core.log().skipped_in_a_row();
  if (impl_->spike) {
    result.spike = impl_->spike->state();
  }
  return result;
}

void StepGuard::load_state(const StepGuardState& state) {
  GradScalerState notes;
  notes.history = state.history;
  notes.skipped_in_a_row = state.skipped_in_a_row;
  scaler::check_notes("load_state", notes);
  auto spike = impl_->spike;
  if (spike) {
    spike->load("load_state", state.spike.value_or(SpikeState{}));
  }
  auto report = state.overflow_report;
  impl_->core.load(1.0, state.history, state.skipped_in_a_row);
  impl_->spike.swap(spike);
  impl_->loaded_report = std::move(report);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            StepGuard& guard) {
  const auto state = guard.state();
  archive.write("skipped_in_a_row", c10::IValue(state.skipped_in_a_row));
  archive.write("history", scaler::history_tensor(state.history), /*is_buffer=*/true);
  scaler::write_report(archive, state.overflow_report);
  if (state.spike) {
    archive.write("spike_norms", at::tensor(state.spike->norms, at::kDouble), /*is_buffer=*/true);
    archive.write("spike_count", c10::IValue(state.spike->count));
  }
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           StepGuard& guard) {
  StepGuardState state;
  state.skipped_in_a_row = scaler::read_entry(kLoad, archive, "skipped_in_a_row").toInt();
  at::Tensor history;
  TORCH_CHECK(archive.try_read("history", history, /*is_buffer=*/true), kLoad,
              ": expected the archive of a StepGuard, got one without an entry \"history\"");
  state.history = scaler::history_in_archive(kLoad, history);
  state.overflow_report = scaler::read_report(kLoad, archive);
  if (at::Tensor norms; archive.try_read("spike_norms", norms, /*is_buffer=*/true)) {
    const auto host = on_device(norms, at::kCPU, at::kDouble).contiguous();
    const auto* const first = host.const_data_ptr<double>();
    state.spike = {.norms = {first, first + host.numel()},
                   .count = scaler::read_entry(kLoad, archive, "spike_count").toInt()};
  }
  guard.load_state(state);
  return archive;
}

}  // namespace fastamp
