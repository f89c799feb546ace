// How GradScaler unscales, checks and steps an optimizer.

#include "scaler/call_step.h"
#include "scaler/grad_scaler_impl.h"

#include <fastamp/optim/fuse.h>
#include <fastamp/optim/gated_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace fastamp {

using optim::GatedOptimizer;
using scaler::DeviceGradients;
using scaler::OptimizerRecord;
using scaler::PassResult;
using scaler::Stage;

namespace {

bool has_sparse(torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      if (gradient.defined() && gradient.is_sparse()) {
        return true;
      }
    }
  }
  return false;
}

/// Whether two parameters have one gradient. Asked only if a gradient came twice.
bool shares_gradients(torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, const void*> owners;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      const void* const owner = parameter.unsafeGetTensorImpl();
      if (gradient.defined() &&
          owners.try_emplace(gradient.unsafeGetTensorImpl(), owner).first->second != owner) {
        return true;
      }
    }
  }
  return false;
}

/// Notes the parameters that come at a position and after it.
void remember_parameters(at::TensorList parameters, std::size_t position,
                         std::vector<scaler::WeakTensor>& known) {
  for (const auto& parameter : parameters) {
    if (position == known.size()) {
      known.emplace_back(parameter.getIntrusivePtr());
    } else if (known[position]._unsafe_get_target() != parameter.unsafeGetTensorImpl()) {
      known[position] = scaler::WeakTensor(parameter.getIntrusivePtr());
    }
    ++position;
  }
}

/// Gives the gate to an optimizer for one step and takes it back if the step throws.
class GateForOneStep {
 public:
  GateForOneStep(GatedOptimizer& optimizer, const optim::StepGate& gate) : optimizer_(optimizer) {
    optimizer_.set_gate(gate);
  }
  ~GateForOneStep() { optimizer_.clear_gate(); }
  GateForOneStep(const GateForOneStep&) = delete;
  GateForOneStep& operator=(const GateForOneStep&) = delete;

 private:
  GatedOptimizer& optimizer_;
};

}  // namespace

OptimizerRecord& GradScaler::Impl::record_of(const torch::optim::Optimizer& optimizer) {
  auto& record = records[&optimizer];
  if (record != nullptr && !record->recognises(optimizer)) {
    const void* const key = record.get();
    records.emplace(key, std::exchange(record, nullptr));
  }
  if (record == nullptr) {
    record = std::make_shared<OptimizerRecord>();
  }
  return *record;
}

Stage GradScaler::Impl::stage_of(const torch::optim::Optimizer& optimizer) const {
  const auto found = records.find(&optimizer);
  return found != records.end() && found->second->recognises(optimizer) ? found->second->stage
                                                                        : Stage::kReady;
}

bool GradScaler::Impl::scaled_anew(const torch::optim::Optimizer& optimizer,
                                   const OptimizerRecord& record) const {
  if (!record.pass || record.times_scaled == state.times_scaled()) {
    return false;
  }
  bool any = false;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      if (gradient.defined() && record.pass->saw(gradient)) {
        return false;  // The first gradient, nearly always.
      }
      any = any || gradient.defined();
    }
  }
  return any;
}

void GradScaler::Impl::check_iteration(const char* function,
                                       const torch::optim::Optimizer& optimizer) {
  auto& record = record_of(optimizer);
  if (record.stage == Stage::kStepped || !scaled_anew(optimizer, record)) {
    return;
  }
  TORCH_CHECK(record.stage == Stage::kReady, function,
              ": expected the gradients that unscale_() has divided by the scale, got others, and "
              "scale() was called since, so that they are scaled. After an iteration that was "
              "broken off, call update() before the next; to replace unscaled gradients, write "
              "into them.");
  record.start_iteration();
}

std::vector<DeviceGradients> GradScaler::Impl::gather(torch::optim::Optimizer& optimizer,
                                                      OptimizerRecord& record, bool allow_fp16,
                                                      scaler::Use use) {
  scaler::GradientGroups groups(allow_fp16, use);
  groups.coalesce_sparse();  // The norm is that of the sums.
  std::size_t position = 0;
  for (const auto& group : optimizer.param_groups()) {
    groups.reserve(group.params().size());
    remember_parameters(group.params(), position, record.parameters);
    position += group.params().size();
    TORCH_CHECK_NOT_IMPLEMENTED(
        groups.add_all(group.params()),
        "unscale_: expected gradients that are plain tensors, got a Python tensor subclass; use "
        "the Python GradScaler for it.");
  }
  record.shares_gradients = groups.any_repeats() && shares_gradients(optimizer);
  return groups.release();
}

void GradScaler::Impl::unscale(torch::optim::Optimizer& optimizer, OptimizerRecord& record) {
  auto gradients = gather(optimizer, record, /*allow_fp16=*/false, scaler::Use::kPassNext);
  auto pass = scaler::unscale(std::move(gradients), state.inv_scale(),
                              scaler::new_flag(state.scale_tensor()), {.memory = &record.memory});
  // An earlier pass lets its gradients go last, since that may run code.
  const auto earlier = std::exchange(record.pass, std::nullopt);
  const PassResult& current = record.pass.emplace(std::move(pass));
  ++passes;
  record.first_pass = record.first_pass != 0 ? record.first_pass : passes;
  record.times_scaled = state.times_scaled();
  record.read_only = false;
  record.stage = Stage::kUnscaled;
  agree(current, record);
}

void GradScaler::Impl::agree(const PassResult& pass, OptimizerRecord& record) const {
  if (!options.agreement()) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (pass.devices().empty()) {
    record.agreed_flag = scaler::new_flag(state.scale_tensor());
  }
  const auto flags = record.flags();
  const auto home = state.scale_tensor().device();
  // Gradients offloaded to the host still have to be agreed on by the device's backend.
  const bool offloaded = home.is_cpu() && options.device() != c10::kCPU;
  const auto combined =
      scaler::combine_flags(flags, offloaded ? c10::Device(options.device()) : home);
  options.agreement()(combined);
  for (const auto& flag : flags) {
    if (!flag.is_same(combined)) {
      flag.copy_(combined, /*non_blocking=*/true);
    }
  }
}

const PassResult* GradScaler::Impl::check(torch::optim::Optimizer& optimizer,
                                          OptimizerRecord& record, std::optional<double> max_norm) {
  if (record.stage != Stage::kReady || has_sparse(optimizer)) {
    return nullptr;
  }
  auto gradients = gather(optimizer, record, /*allow_fp16=*/true, scaler::Use::kPassNext);
  if (record.shares_gradients || !scaler::can_check(gradients)) {
    return nullptr;
  }
  if (!max_norm && record.pass && record.read_only && record.pass->holds(gradients)) {
    return &*record.pass;
  }
  if (record.pass) {
    // Its gradients go, which may run code that changes everything read so far.
    static_cast<void>(std::exchange(record.pass, std::nullopt));
    return check(optimizer, record, max_norm);
  }
  record.pass.emplace(scaler::check(std::move(gradients), state.inv_scale(),
                                    scaler::new_flag(state.scale_tensor()),
                                    {.memory = &record.memory}, max_norm));
  ++passes;
  record.first_pass = record.first_pass != 0 ? record.first_pass : passes;
  record.times_scaled = state.times_scaled();
  record.read_only = true;
  agree(*record.pass, record);
  return &*record.pass;
}

bool GradScaler::Impl::folds(torch::optim::Optimizer& optimizer) {
  return takes_gate(optimizer) && !has_sparse(optimizer);
}

bool GradScaler::Impl::takes_gate(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<GatedOptimizer*>(&optimizer) != nullptr) {
    return true;
  }
  if (options.fuse() && !optim::is_fused(optimizer) && optim::can_fuse(optimizer)) {
    optim::fuse(optimizer);
  }
  return optim::is_fused(optimizer);
}

void GradScaler::Impl::step_through_gate(torch::optim::Optimizer& optimizer,
                                         OptimizerRecord& record,
                                         std::optional<at::Tensor>& result) {
  optim::StepGate gate;
  const bool fresh = record.stage == Stage::kReady;
  if (fresh && check(optimizer, record, std::nullopt) != nullptr) {
    gate.inv_scale = state.inv_scale();
  } else if (fresh || record.shares_gradients) {
    // Sparse gradients are clipped in place: a step sees dense copies. So are shared ones, which
    // the step does not write.
    clip_now(optimizer, record);
  }
  const auto flags = record.flags();
  if (flags.empty() && fresh) {
    record.start_iteration();  // A refused call takes its own unscaling back.
  }
  TORCH_CHECK(
      !flags.empty(),
      "step: expected an optimizer with at least one gradient, got none. No inf checks were "
      "recorded for this optimizer.");
  gate.found_inf = scaler::combine_flags(flags, flags.front().device());
  if (record.clip_coef.defined()) {
    gate.clip_coef = record.clip_coef;
  }
  gate.clip_value = record.clip_value;
  gate.write_grads = !options.keep_scaled_grads() && !record.shares_gradients;
  if (auto* gated = dynamic_cast<GatedOptimizer*>(&optimizer)) {
    const GateForOneStep scope(*gated, gate);
    result = scaler::call_step(optimizer);
  } else {
    optim::fused_step(optimizer, gate);
    result.emplace();
  }
  record.end_step();
}

std::optional<at::Tensor> GradScaler::Impl::step_if_finite(torch::optim::Optimizer& optimizer,
                                                           OptimizerRecord& record) {
  const bool fresh = record.stage == Stage::kReady;
  if (fresh) {
    unscale(optimizer, record);
  }
  const auto flags = record.flags();
  if (flags.empty() && fresh) {
    record.start_iteration();
  }
  TORCH_CHECK(
      !flags.empty(),
      "step: expected an optimizer with at least one gradient, got none. No inf checks were "
      "recorded for this optimizer.");
  bool finite = true;
  for (const auto& flag : flags) {
    finite = finite && flag.item<float>() == 0.0F;  // sync: the host decides on the step
  }
  std::optional<at::Tensor> result;
  if (finite) {
    result = scaler::call_step(optimizer);
  }
  record.end_step();
  return result;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  expect_not_moved_from("unscale_");
  if (!impl_->enabled) {
    return;
  }
  impl_->expect_scale("unscale_");
  const auto stage = impl_->stage_of(optimizer);
  TORCH_CHECK(
      stage != Stage::kUnscaled,
      "unscale_: expected one call per optimizer and iteration, got a second one; unscale_() "
      "has already been called on this optimizer since the last update().");
  TORCH_CHECK(
      stage != Stage::kStepped,
      "unscale_: expected a call before step(), got one after it; unscale_() is being called "
      "after step().");
  impl_->check_iteration("unscale_", optimizer);
  auto& record = impl_->record_of(optimizer);
  impl_->unscale(optimizer, record);
  impl_->clip_now(optimizer, record);  // Whoever unscales wants to see the gradients.
}

std::optional<at::Tensor> GradScaler::step(torch::optim::Optimizer& optimizer,
                                           const torch::optim::Optimizer::LossClosure& closure) {
  expect_not_moved_from("step");
  if (!impl_->enabled) {
    return scaler::call_step(optimizer, closure);
  }
  TORCH_CHECK(!closure,
              "step: expected no closure while the scaler is enabled, got one. Closure use "
              "is not currently supported if GradScaler is enabled.");
  impl_->expect_scale("step");
  TORCH_CHECK(impl_->stage_of(optimizer) != Stage::kStepped,
              "step: expected one call per optimizer and iteration, got a second one; step() has "
              "already been called since the last update().");
  impl_->check_iteration("step", optimizer);
  auto& record = impl_->record_of(optimizer);
  if (!impl_->takes_gate(optimizer)) {
    return impl_->step_if_finite(optimizer, record);
  }
  std::optional<at::Tensor> result;
  impl_->step_through_gate(optimizer, record, result);
  return result;
}

}  // namespace fastamp
