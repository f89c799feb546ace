// The typed entries of the fused steps.

#include "ops/inplace.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {

void fused_sgd_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                at::TensorList momentum_steps, at::TensorList masters, at::IntArrayRef group_sizes,
                at::ArrayRef<double> lr, at::ArrayRef<double> momentum,
                at::ArrayRef<double> dampening, at::ArrayRef<double> weight_decay,
                const c10::List<bool>& nesterov, const c10::List<bool>& maximize,
                at::TensorList lr_tensors, at::TensorList shadows, at::IntArrayRef shadow_of,
                const std::optional<at::Tensor>& inv_scale,
                const std::optional<at::Tensor>& clip_coef,
                const std::optional<at::Tensor>& found_inf, std::optional<double> clip_value,
                bool write_grads) {
  static const auto op = find_op<decltype(fused_sgd_)>("fastamp::fused_sgd_");
  op.call(params, grads, momentum_buffers, momentum_steps, masters, group_sizes, lr, momentum,
          dampening, weight_decay, nesterov, maximize, lr_tensors, shadows, shadow_of, inv_scale,
          clip_coef, found_inf, clip_value, write_grads);
}

void fused_adamw_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                  at::TensorList state_steps, at::TensorList masters, at::IntArrayRef group_sizes,
                  at::ArrayRef<double> lr, at::ArrayRef<double> beta1, at::ArrayRef<double> beta2,
                  at::ArrayRef<double> eps, at::ArrayRef<double> weight_decay,
                  const c10::List<bool>& decoupled, const c10::List<bool>& amsgrad,
                  const c10::List<bool>& maximize, at::TensorList lr_tensors,
                  at::TensorList shadows, at::IntArrayRef shadow_of,
                  const std::optional<at::Tensor>& inv_scale,
                  const std::optional<at::Tensor>& clip_coef,
                  const std::optional<at::Tensor>& found_inf, std::optional<double> clip_value,
                  bool write_grads) {
  static const auto op = find_op<decltype(fused_adamw_)>("fastamp::fused_adamw_");
  op.call(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, masters, group_sizes,
          lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, lr_tensors, shadows,
          shadow_of, inv_scale, clip_coef, found_inf, clip_value, write_grads);
}

}  // namespace fastamp::ops
