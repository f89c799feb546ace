// SPDX-License-Identifier: Apache-2.0
#include "kernels/muon.h"

namespace fastamp::kernels {
namespace {

const std::optional<at::Tensor>& no_tensor() {
  static const std::optional<at::Tensor> none;
  return none;
}

}  // namespace

StepArgs MuonMomentumArgs::common() const {
  return {.fn = "muon_momentum_",
          .params = updates,
          .grads = grads,
          .masters = {},
          .group_sizes = group_sizes,
          .lr = momentum,
          .lr_tensors = {},
          .inv_scale = inv_scale,
          .clip_coef = clip_coef,
          .found_inf = found_inf,
          .clip_value = clip_value,
          .write_grads = write_grads,
          .weight_copies = {},
          .copy_of = {},
          .noise_origins = noise_origins};
}

StepArgs MuonApplyArgs::common() const {
  return {.fn = "muon_apply_",
          .params = params,
          .grads = updates,
          .masters = masters,
          .group_sizes = group_sizes,
          .lr = lr,
          .lr_tensors = lr_tensors,
          .inv_scale = no_tensor(),
          .clip_coef = no_tensor(),
          .found_inf = found_inf,
          .clip_value = std::nullopt,
          .write_grads = false,
          .weight_copies = weight_copies,
          .copy_of = copy_of,
          .grads_name = "updates"};
}

StepEntry momentum_entry(const MuonMomentumArgs& args, std::size_t index, std::size_t group,
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

std::vector<MuonMomentumConstants> momentum_constants(const MuonMomentumArgs& args) {
  std::vector<MuonMomentumConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({args.momentum[g], args.nesterov.get(g)});
  }
  return groups;
}

std::vector<MuonApplyConstants> apply_constants(const MuonApplyArgs& args) {
  std::vector<MuonApplyConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(args.common(), g), args.ratio[g], args.weight_decay[g]});
  }
  return groups;
}

}  // namespace fastamp::kernels
