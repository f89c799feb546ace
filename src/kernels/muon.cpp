// SPDX-License-Identifier: Apache-2.0
#include "kernels/muon.h"

namespace fastamp::kernels {
namespace {

const std::optional<at::Tensor>& no_tensor() {
  static const std::optional<at::Tensor> none;
  return none;
}

}  // namespace

StepArgs step_args(const ops::MuonMomentumArgs& args) {
  return {.fn = "muon_momentum_",
          .params = args.updates,
          .grads = args.grads,
          .masters = {},
          .group_sizes = args.group_sizes,
          .lr = args.momentum,
          .lr_tensors = {},
          .inv_scale = args.inv_scale,
          .clip_coef = args.clip_coef,
          .found_inf = args.found_inf,
          .clip_value = args.clip_value,
          .write_grads = args.write_grads,
          .weight_copies = {},
          .copy_of = {},
          .noise_origins = args.noise_origins};
}

StepArgs step_args(const ops::MuonApplyArgs& args) {
  return {.fn = "muon_apply_",
          .params = args.params,
          .grads = args.updates,
          .masters = args.masters,
          .group_sizes = args.group_sizes,
          .lr = args.lr,
          .lr_tensors = args.lr_tensors,
          .inv_scale = no_tensor(),
          .clip_coef = no_tensor(),
          .found_inf = args.found_inf,
          .clip_value = std::nullopt,
          .write_grads = false,
          .weight_copies = args.weight_copies,
          .copy_of = args.copy_of,
          .grads_name = "updates"};
}

StepEntry momentum_entry(const ops::MuonMomentumArgs& args, std::size_t index, std::size_t group,
                         const at::Tensor* count) {
  StepEntry entry;
  entry.tensors[kGrad] = &args.grads[index];
  entry.tensors[kWeight] = &args.updates[index];
  entry.tensors[kHalf] = &args.updates[index];
  entry.tensors[kFirst] = &args.momentum_buffers[index];
  entry.tensors[kStep] = count;
  entry.half_is_copy = true;
  entry.group = group;
  entry.noise_origin = args.noise_origins.empty() ? -1 : args.noise_origins[index];
  return entry;
}

std::vector<MuonMomentumConstants> momentum_constants(const ops::MuonMomentumArgs& args) {
  std::vector<MuonMomentumConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({args.momentum[g], args.nesterov.get(g)});
  }
  return groups;
}

std::vector<MuonApplyConstants> apply_constants(const ops::MuonApplyArgs& args) {
  const auto common = step_args(args);
  std::vector<MuonApplyConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(common, g), args.ratio[g], args.weight_decay[g]});
  }
  return groups;
}

}  // namespace fastamp::kernels
