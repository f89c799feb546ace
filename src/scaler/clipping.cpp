// Clipping by GradScaler: at once, or put off to the step where the optimizer takes a gate.

#include "scaler/clip_norms.h"
#include "scaler/grad_scaler_impl.h"
#include "scaler/gradient_factors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fastamp {

using scaler::DeviceGradients;
using scaler::OptimizerRecord;
using scaler::Stage;

namespace {

void clamp_now(const std::vector<DeviceGradients>& gradients, double clip_value) {
  for (const auto& group : gradients) {
    at::_foreach_clamp_min_(group.gradients, -clip_value);
    at::_foreach_clamp_max_(group.gradients, clip_value);
  }
}

}  // namespace

at::Tensor GradScaler::Impl::norm_of(const std::vector<DeviceGradients>& gradients,
                                     const OptimizerRecord* record, double norm_type) {
  if (norm_type != 2.0) {
    return scaler::norm_of_norms(gradients, norm_type, /*widen=*/true);
  }
  if (record != nullptr && record->pass && record->pass->has_norm() &&
      record->pass->holds(gradients)) {
    return record->pass->total_norm(at::kFloat);
  }
  if (!scaler::can_check(gradients)) {
    return scaler::norm_of_norms(gradients, norm_type, /*widen=*/true);
  }
  const auto device = at::TensorOptions(at::kFloat).device(gradients.front().device);
  return scaler::check(gradients, at::ones({}, device), at::zeros({}, device), {})
      .total_norm(at::kFloat);
}

OptimizerRecord& GradScaler::Impl::begin_clipping(const char* function,
                                                  torch::optim::Optimizer& optimizer) {
  expect_scale(function);
  TORCH_CHECK(stage_of(optimizer) != Stage::kStepped, function,
              ": expected a call before step(), got one after it; ", function,
              "() is being called after step().");
  check_iteration(function, optimizer);
  return record_of(optimizer);
}

void GradScaler::Impl::clip_now(torch::optim::Optimizer& optimizer, OptimizerRecord& record) {
  const at::NoGradGuard no_grad;
  if (record.stage == Stage::kReady) {
    unscale(optimizer, record);
  }
  if (!record.clip_coef.defined() && !record.clip_value) {
    return;
  }
  const auto gradients = gather(optimizer, record, /*allow_fp16=*/true, scaler::Use::kTensors);
  if (record.clip_coef.defined()) {
    scaler::multiply_(gradients, std::exchange(record.clip_coef, at::Tensor()));
  }
  if (const auto clip_value = std::exchange(record.clip_value, std::nullopt)) {
    clamp_now(gradients, *clip_value);
  }
}

at::Tensor GradScaler::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                       double norm_type, bool error_if_nonfinite) {
  expect_not_moved_from("clip_grad_norm_");
  const at::NoGradGuard no_grad;
  OptimizerRecord unused;
  const bool enabled = impl_->enabled;
  auto& record = enabled ? impl_->begin_clipping("clip_grad_norm_", optimizer) : unused;
  bool put_off = enabled && impl_->folds(optimizer);
  if (record.clip_coef.defined() || record.clip_value) {
    impl_->clip_now(optimizer, record);
  }
  at::Tensor coefficient;
  at::Tensor norm;
  std::vector<DeviceGradients> gradients;
  const auto* const pass =
      put_off && norm_type == 2.0 ? impl_->check(optimizer, record, max_norm) : nullptr;
  if (pass != nullptr) {
    if (pass->devices().empty()) {
      return at::zeros({});
    }
    norm = pass->total_norm(at::kFloat);
    coefficient = pass->devices().front().clip_coef;
  } else {
    if (enabled && record.stage == Stage::kReady) {
      impl_->unscale(optimizer, record);
    }
    gradients = Impl::gather(optimizer, record, /*allow_fp16=*/true, scaler::Use::kTensors);
    if (gradients.empty()) {
      return at::zeros({});
    }
    norm = Impl::norm_of(gradients, &record, norm_type);
    put_off = put_off && !record.shares_gradients;
  }
  if (error_if_nonfinite) {
    scaler::check_finite(norm, norm_type);
  }
  if (!coefficient.defined()) {
    coefficient = scaler::clip_coefficient(norm, max_norm);
  }
  if (put_off) {
    record.clip_coef = coefficient.to(at::kFloat);
  } else {
    scaler::multiply_(gradients, coefficient);
  }
  if (norm_type == 2.0) {
    record.norm = norm;
  }
  return norm;
}

void GradScaler::clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  expect_not_moved_from("clip_grad_value_");
  TORCH_CHECK_VALUE(clip_value >= 0.0, "clip_grad_value_: expected clip_value >= 0, got ",
                    clip_value);
  const at::NoGradGuard no_grad;
  if (!impl_->enabled) {
    OptimizerRecord unused;
    clamp_now(Impl::gather(optimizer, unused, /*allow_fp16=*/true, scaler::Use::kTensors),
              clip_value);
    return;
  }
  auto& record = impl_->begin_clipping("clip_grad_value_", optimizer);
  if (record.clip_value) {
    impl_->clip_now(optimizer, record);
  }
  record.clip_value = clip_value;
  // The pass, which the step will use, tells whose gradients are to be clipped: others that a later
  // iteration makes, if this one is broken off, are not.
  const bool put_off =
      impl_->folds(optimizer) &&
      (record.stage != Stage::kReady || impl_->check(optimizer, record, std::nullopt) != nullptr);
  if (!put_off) {
    impl_->clip_now(optimizer, record);
  }
}

}  // namespace fastamp
