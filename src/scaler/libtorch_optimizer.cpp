// SPDX-License-Identifier: Apache-2.0
#include "scaler/libtorch_optimizer.h"

#include "autocast/kept_casts.h"
#include "core/tensor_lists.h"
#include "scaler/clip_norms.h"
#include "scaler/scaler_core.h"

#include <fastamp/autocast/weights_changed.h>
#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/amp_step_optimizer.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <typeinfo>
#include <unordered_map>
#include <utility>

namespace fastamp::scaler {
namespace {

using optim::AmpStepOptimizer;

using torch::optim::Optimizer;

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

/// Gives an AmpStep to an optimizer for one step and takes it back if the step throws.
class AmpStepForOneCall {
 public:
  AmpStepForOneCall(AmpStepOptimizer& optimizer, const optim::AmpStep& amp_step)
      : optimizer_(optimizer) {
    optimizer_.set_amp_step(amp_step);
  }
  ~AmpStepForOneCall() { optimizer_.clear_amp_step(); }
  AmpStepForOneCall(const AmpStepForOneCall&) = delete;
  AmpStepForOneCall& operator=(const AmpStepForOneCall&) = delete;

 private:
  AmpStepOptimizer& optimizer_;
};

const at::Tensor& gradient_of(const at::Tensor& parameter) {
  return parameter.unsafeGetTensorImpl()->grad();
}

std::intptr_t key_of(const Optimizer& optimizer) {
  return reinterpret_cast<std::intptr_t>(&optimizer);
}

/// Whether a handle that was found by the address is the optimizer's own, and not one's that was
/// destroyed.
bool is_handle_of(const LibTorchHandle& handle, const Optimizer& optimizer) {
  const auto& parameters = handle.parameters;
  PointerSet known;
  for (const auto& group : optimizer.param_groups()) {
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

/// Whether two parameters have one gradient. Asked only if a gradient came twice.
bool shares_gradients(const Optimizer& optimizer) {
  std::unordered_map<const void*, const void*> owners;
  for (const auto& group : optimizer.param_groups()) {
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

/// Exactly fastamp's: a derived class may have a step() of its own.
bool moves_versions(const Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  return type == typeid(optim::SGD) || type == typeid(optim::Adam) ||
         type == typeid(optim::AdamW) || type == typeid(optim::Muon);
}

/// Lists the weights at once: there may be no memory for that after a step.
class WeightsChangedAtEnd {
 public:
  explicit WeightsChangedAtEnd(const Optimizer& optimizer)
      : weights_(autocast::keys_of_weights(optimizer)) {}
  ~WeightsChangedAtEnd() { autocast::forget_casts(weights_); }
  WeightsChangedAtEnd(const WeightsChangedAtEnd&) = delete;
  WeightsChangedAtEnd& operator=(const WeightsChangedAtEnd&) = delete;

 private:
  std::vector<const c10::TensorImpl*> weights_;
};

}  // namespace

bool LibTorchHandle::is_gone() const {
  return !parameters.empty() && std::ranges::all_of(parameters, [](const WeakTensor& parameter) {
    return parameter.expired();
  });
}

LibTorchHandle& handle_of(const OptimizerRecord& record) {
  return static_cast<LibTorchHandle&>(*record.handle);
}

RecordPointer find_record(const ScalerCore& core, const Optimizer& optimizer) {
  auto record = core.find(key_of(optimizer));
  return record != nullptr && is_handle_of(handle_of(*record), optimizer) ? record : nullptr;
}

RecordPointer record_of(ScalerCore& core, const Optimizer& optimizer) {
  if (auto record = find_record(core, optimizer)) [[likely]] {
    return record;
  }
  core.set_aside(key_of(optimizer));
  auto handle = std::make_unique<LibTorchHandle>();
  handle->optimizer = &optimizer;
  return core.add(key_of(optimizer), std::move(handle));
}

bool has_sparse(const Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (gradient.defined() && gradient.is_sparse()) {
        return true;
      }
    }
  }
  return false;
}

Gathered gather(const Optimizer& optimizer, OptimizerRecord& record, Purpose purpose) {
  GradientGroups groups(purpose);
  groups.coalesce_sparse();  // The norm is that of the sums.
  auto* const handle = static_cast<LibTorchHandle*>(record.handle.get());
  std::size_t position = 0;
  for (const auto& group : optimizer.param_groups()) {
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
  const bool shared = groups.any_repeats() && shares_gradients(optimizer);
  return {.groups = groups.release(), .multiply_foreign = nullptr, .shared = shared};
}

bool is_scaled_anew(const Optimizer& optimizer, const OptimizerRecord& record,
                    const ScalerCall& call) {
  if (!ScalerCore::may_be_scaled_anew(record, call.times_scaled)) {
    return false;
  }
  bool any = false;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (gradient.defined() && record.pass->saw(gradient)) {
        return false;
      }
      any = any || gradient.defined();
    }
  }
  return any;
}

void apply_clips(const Optimizer& optimizer, OptimizerRecord& record) {
  const at::NoGradGuard no_grad;
  if (const auto coefficient = record.clip_coef; coefficient.defined()) {
    ScalerCore::multiply(gather(optimizer, record, Purpose::kMultiply), coefficient);
    record.clip_coef = at::Tensor();
  }
  if (const auto clip_value = record.clip_value) {
    clip_values(optimizer, record, *clip_value);
    record.clip_value.reset();
  }
  record.clips_due = false;
}

void clip_values(const Optimizer& optimizer, OptimizerRecord& record, double clip_value) {
  for (const auto& group : gather(optimizer, record, Purpose::kMultiply).groups) {
    at::_foreach_clamp_min_(group.gradients, -clip_value);
    at::_foreach_clamp_max_(group.gradients, clip_value);
  }
}

at::Tensor clip_unscaled(const Optimizer& optimizer, OptimizerRecord& record, const NormClip& clip,
                         bool at_step, const ScalerCall* call) {
  const at::NoGradGuard no_grad;
  const auto gathered = gather(optimizer, record, Purpose::kNorm);
  const bool any = !gathered.groups.empty();
  at::Tensor norm;
  if (any && clip.norm_type == 2.0) {
    norm = ScalerCore::two_norm(record, gathered, at::kFloat);
  }
  if (any && !norm.defined()) {
    norm = norm_of_norms(gathered.groups, clip.norm_type, /*widen=*/true);
  }
  ScalerCore::clip_norm(record, gathered, norm, clip, at_step, call);
  return norm;
}

bool supports_amp_step(Optimizer& optimizer, bool fuse) {
  if (dynamic_cast<AmpStepOptimizer*>(&optimizer) != nullptr) {
    return true;
  }
  if (fuse && !optim::is_fused(optimizer) && optim::can_fuse(optimizer)) {
    optim::fuse_(optimizer);
  }
  return optim::is_fused(optimizer);
}

at::Tensor step_with(Optimizer& optimizer, const optim::AmpStep& amp_step) {
  if (auto* own = dynamic_cast<AmpStepOptimizer*>(&optimizer)) {
    const AmpStepForOneCall scope(*own, amp_step);
    return call_step(optimizer);
  }
  optim::fused_step(optimizer, amp_step);
  return {};
}

at::Tensor call_step(Optimizer& optimizer, const Optimizer::LossClosure& closure) {
  if (moves_versions(optimizer)) {
    return optimizer.step(closure);
  }
  const WeightsChangedAtEnd changed(optimizer);
  if (!closure) {
    return optimizer.step();
  }
  return optimizer.step([&] {
    weights_changed(optimizer);
    return closure();
  });
}

}  // namespace fastamp::scaler
