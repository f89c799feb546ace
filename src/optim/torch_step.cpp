// SPDX-License-Identifier: Apache-2.0
#include "optim/torch_step.h"

#include "autocast/tensor_identity.h"
#include "optim/step_lists.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fastamp::optim {
namespace {

bool changes_gradients(const AmpStep& amp_step) {
  return amp_step.inv_scale.has_value() || amp_step.clip_coef.has_value() ||
         amp_step.clip_value.has_value();
}

at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

void apply_factors(const AmpStep& amp_step, const at::Tensor& gradient) {
  const auto values = values_of(gradient);
  const auto here = amp_step_on(amp_step, values.device());
  for (const auto& factor : {here.inv_scale, here.clip_coef}) {
    if (factor) {
      values.mul_(factor->reshape({}));
    }
  }
  if (here.clip_value) {
    values.clamp_(-*here.clip_value, *here.clip_value);
  }
}

}  // namespace

void check_not_captured(const char* function, const std::vector<at::Tensor>& params) {
  for (const auto& param : params) {
    TORCH_CHECK_TYPE(!autocast::is_captured(param), function,
                     ": expected float32, float16 or bfloat16 parameters while a CUDA graph is "
                     "captured, got ",
                     param.scalar_type(), " of shape ", param.sizes());
  }
}

bool is_skipped(const AmpStep& amp_step) {
  return amp_step.found_inf && amp_step.found_inf->defined() &&
         amp_step.found_inf->item<float>() != 0.0F;  // sync: LibTorch's step cannot be made to skip
}

void GradientsForTorch::prepare(const std::vector<at::Tensor>& params, bool maximize) {
  const at::NoGradGuard no_grad;
  for (const auto& param : params) {
    // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the parameter gets another
    const at::Tensor given = param.grad();
    at::Tensor gradient = given;
    at::Tensor written;
    if (changes_gradients(amp_step_)) {
      gradient = given.clone();
      apply_factors(amp_step_, gradient);
      if (amp_step_.write_grads) {
        at::assert_no_internal_overlap(values_of(given));
        written = gradient;
      }
    }
    if (gradient.is_sparse()) {
      gradient = gradient.to_dense();
    }
    if (maximize) {
      gradient = gradient.neg();
    }
    if (!gradient.is_same(given)) {
      lent_.push_back({param, given, std::move(written)});
      param.mutable_grad() = gradient;
    }
  }
}

void GradientsForTorch::finish() const {
  const at::NoGradGuard no_grad;
  for (const auto& lent : lent_) {
    if (lent.written.defined()) {
      values_of(lent.gradient).copy_(values_of(lent.written));
    }
  }
}

GradientsForTorch::~GradientsForTorch() {
  for (const auto& lent : lent_) {
    lent.param.mutable_grad() = lent.gradient;
  }
}

}  // namespace fastamp::optim
