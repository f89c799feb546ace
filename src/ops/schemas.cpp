// The schemas of every fastamp op, in one place: what is mutated is read here and nowhere else.

#include "ops/library.h"

FASTAMP_SCHEMAS(m) {
  m.def(
      "unscale_and_check_(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf, *, "
      "Tensor(c!)? sum_of_squares=None, Tensor(d!)? non_finite_counts=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "norm_and_check_(Tensor[] grads, Tensor inv_scale, Tensor(a!) found_inf, "
      "Tensor(b!) sum_of_squares, *, Tensor(c!)? non_finite_counts=None, float? max_norm=None, "
      "Tensor(d!)? clip_coef=None, Tensor(e!)? total_norm=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor found_inf, "
      "float growth_factor, float backoff_factor, int growth_interval, *, "
      "Tensor(c!)? hysteresis_tracker=None, int hysteresis=1, "
      "float? min_scale=None, float? max_scale=None, Tensor(d!)? inv_scale=None, "
      "Tensor? norm=None, Tensor(e!)? history=None, Tensor(f!)? history_count=None, "
      "Tensor? new_scale=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "fused_sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, "
      "Tensor(d!)[] momentum_steps, Tensor(e!)[] masters, int[] group_sizes, float[] lr, "
      "float[] momentum, float[] dampening, float[] weight_decay, bool[] nesterov, "
      "bool[] maximize, Tensor[] lr_tensors, Tensor(f!)[] shadows, int[] shadow_of, *, "
      "Tensor? inv_scale=None, Tensor? clip_coef=None, Tensor? found_inf=None, "
      "float? clip_value=None, bool write_grads=True) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "fused_adamw_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps, "
      "Tensor(g!)[] masters, int[] group_sizes, float[] lr, float[] beta1, float[] beta2, "
      "float[] eps, float[] weight_decay, bool[] decoupled, bool[] amsgrad, bool[] maximize, "
      "Tensor[] lr_tensors, Tensor(h!)[] shadows, int[] shadow_of, *, Tensor? inv_scale=None, "
      "Tensor? clip_coef=None, Tensor? found_inf=None, float? clip_value=None, "
      "bool write_grads=True) -> ()",
      {at::Tag::pt2_compliant_tag});
}
