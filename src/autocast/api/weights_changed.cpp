// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/changed_weights.h"
#include "autocast/cache/kept_casts.h"

#include <fastamp/autocast/weights_changed.h>

#include <torch/optim/optimizer.h>

#include <vector>

namespace fastamp {
namespace {

using Keys = std::vector<const c10::TensorImpl*>;

void add_keys(at::TensorList weights, Keys& keys) {
  for (const at::Tensor& weight : weights) {
    if (weight.defined()) {
      keys.push_back(weight.unsafeGetTensorImpl());
    }
  }
}

void forget_casts(const Keys& keys) {
  if (autocast::KeptCastStore::instance().is_used()) {
    autocast::KeptCastStore::instance().drop(keys);
  }
  autocast::log_changed_weights(keys);
}

}  // namespace

void weights_changed(at::TensorList weights) {
  Keys keys;
  add_keys(weights, keys);
  forget_casts(keys);
}

void weights_changed(const torch::optim::Optimizer& optimizer) {
  Keys keys;
  for (const auto& group : optimizer.param_groups()) {
    add_keys(group.params(), keys);
  }
  forget_casts(keys);
}

}  // namespace fastamp
