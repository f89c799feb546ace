// SPDX-License-Identifier: Apache-2.0
#include "scaler/libtorch_optimizer.h"

#include "core/repeat_finder.h"
#include "scaler/call_step.h"
#include "scaler/clip_norms.h"
#include "scaler/scaler_core.h"

#include <fastamp/optim/fuse.h>
#include <fastamp/optim/gated_optimizer.h>

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace fastamp::scaler {
namespace {

using optim::GatedOptimizer;

/// Notes the parameters that come at a position and after it.
void remember_parameters(at::TensorList parameters, std::size_t position,
                         std::vector<WeakTensor>& known) {
  for (const auto& parameter : parameters) {
    if (position == known.size()) {
      known.emplace_back(parameter.getIntrusivePtr());
    } else if (known[position]._unsafe_get_target() != parameter.unsafeGetTensorImpl()) {
      known[position] = WeakTensor(parameter.getIntrusivePtr());
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

const at::Tensor& gradient_of(const at::Tensor& parameter) {
  return parameter.unsafeGetTensorImpl()->grad();
}

}  // namespace

bool LibTorchHandle::is_gone() const {
  return !parameters.empty() && std::ranges::all_of(parameters, [](const WeakTensor& parameter) {
    return parameter.expired();
  });
}

void LibTorchHandle::start_iteration() {
  stage = Stage::kReady;
  flags.clear();
}

LibTorchHandle& handle_of(const OptimizerRecord& record) {
  return static_cast<LibTorchHandle&>(*record.handle);
}

std::intptr_t LibTorchOptimizer::key() const {
  return reinterpret_cast<std::intptr_t>(&optimizer_);
}

std::unique_ptr<OptimizerHandle> LibTorchOptimizer::make_handle() {
  auto handle = std::make_unique<LibTorchHandle>();
  handle->optimizer = &optimizer_;
  return handle;
}

bool LibTorchOptimizer::owns(const OptimizerHandle& handle) const {
  const auto& parameters = static_cast<const LibTorchHandle&>(handle).parameters;
  PointerSet known;
  for (const auto& group : optimizer_.param_groups()) {
    for (const auto& parameter : group.params()) {
      // A weak reference keeps the address: no other parameter can come to have it.
      const void* const address = parameter.unsafeGetTensorImpl();
      if (parameters.empty() || parameters.front()._unsafe_get_target() == address) {
        return true;  // So it ends at the first parameter, nearly always.
      }
      known.insert(address);
    }
  }
  return parameters.empty() || std::ranges::any_of(parameters, [&](const WeakTensor& parameter) {
           return !known.insert(parameter._unsafe_get_target());
         });
}

Stage LibTorchOptimizer::stage(const OptimizerRecord& record) const {
  return handle_of(record).stage;
}

std::vector<at::Tensor> LibTorchOptimizer::flags(const OptimizerRecord& record) const {
  return handle_of(record).flags;
}

void LibTorchOptimizer::set(OptimizerRecord& record, Stage stage,
                            const std::vector<at::Tensor>& flags) {
  auto& handle = handle_of(record);
  handle.stage = stage;
  handle.flags = flags;
}

void LibTorchOptimizer::set_stepped(OptimizerRecord& record) {
  handle_of(record).stage = Stage::kStepped;
}

void LibTorchOptimizer::reset(OptimizerRecord& record) { set(record, Stage::kReady, {}); }

bool LibTorchOptimizer::has_sparse() const {
  for (const auto& group : optimizer_.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (gradient.defined() && gradient.is_sparse()) {
        return true;
      }
    }
  }
  return false;
}

/// Asked only if a gradient came twice.
bool LibTorchOptimizer::shares_gradients() const {
  std::unordered_map<const void*, const void*> owners;
  for (const auto& group : optimizer_.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      const void* const owner = parameter.unsafeGetTensorImpl();
      if (gradient.defined() &&
          owners.try_emplace(gradient.unsafeGetTensorImpl(), owner).first->second != owner) {
        return true;
      }
    }
  }
  return false;
}

Gathered LibTorchOptimizer::gather(OptimizerRecord& record, Purpose purpose) {
  const bool pass_next = purpose == Purpose::kUnscale || purpose == Purpose::kCheck;
  GradientGroups groups(/*allow_fp16=*/purpose != Purpose::kUnscale,
                        pass_next ? Use::kPassNext : Use::kTensors);
  groups.coalesce_sparse();  // The norm is that of the sums.
  auto* const handle = static_cast<LibTorchHandle*>(record.handle.get());
  std::size_t position = 0;
  for (const auto& group : optimizer_.param_groups()) {
    groups.reserve(group.params().size());
    if (handle != nullptr) {
      remember_parameters(group.params(), position, handle->parameters);
    }
    position += group.params().size();
    TORCH_CHECK_NOT_IMPLEMENTED(
        groups.add_all(group.params()),
        "unscale_: expected gradients that are plain tensors, got a Python tensor subclass; use "
        "the Python GradScaler for it.");
  }
  record.shares_gradients = groups.any_repeats() && shares_gradients();
  return {.groups = groups.release()};
}

bool LibTorchOptimizer::all_gradients(c10::function_ref<bool(const at::Tensor&)> visit) const {
  bool any = false;
  for (const auto& group : optimizer_.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (gradient.defined() && !visit(gradient)) {
        return false;
      }
      any = any || gradient.defined();
    }
  }
  return any;
}

void LibTorchOptimizer::unscale() {
  core_->unscale(*this, *call_);
  ScalerCore::apply_clips(*this, core_->record_of(*this));
}

at::Tensor LibTorchOptimizer::flag_for_pass(OptimizerRecord& /*record*/, const at::Tensor& scale) {
  return flag_without_value(scale);
}

c10::ScalarType LibTorchOptimizer::norm_dtype(
    const std::vector<DeviceGradients>& /*groups*/) const {
  return at::kFloat;
}

at::Tensor LibTorchOptimizer::torchs_norm(const Gathered& gathered, double norm_type) {
  return norm_of_norms(gathered.groups, norm_type, /*widen=*/true);
}

void LibTorchOptimizer::clamp(OptimizerRecord& record, double clip_value) {
  for (const auto& group : gather(record, Purpose::kMultiply).groups) {
    at::_foreach_clamp_min_(group.gradients, -clip_value);
    at::_foreach_clamp_max_(group.gradients, clip_value);
  }
}

void LibTorchOptimizer::check_finite(const at::Tensor& norm, double norm_type) const {
  scaler::check_finite(norm, norm_type);
}

bool LibTorchOptimizer::takes_gate(bool fuse) {
  if (dynamic_cast<GatedOptimizer*>(&optimizer_) != nullptr) {
    return true;
  }
  if (fuse && !optim::is_fused(optimizer_) && optim::can_fuse(optimizer_)) {
    optim::fuse(optimizer_);
  }
  return optim::is_fused(optimizer_);
}

void LibTorchOptimizer::step(const optim::StepGate& gate) {
  if (auto* gated = dynamic_cast<GatedOptimizer*>(&optimizer_)) {
    const GateForOneStep scope(*gated, gate);
    result_ = call_step(optimizer_);
  } else {
    optim::fused_step(optimizer_, gate);
    result_.emplace();
  }
}

}  // namespace fastamp::scaler
