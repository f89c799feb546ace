// SPDX-License-Identifier: Apache-2.0
#include "scaler/optimizer_record.h"

#include "core/device_copy.h"

#include <ATen/TensorOperators.h>

#include <utility>

namespace fastamp::scaler {

std::shared_ptr<PassResult> OptimizerRecord::start_iteration() {
  progress = {};
  ranges.start_iteration();
  times_scaled = 0;
  first_pass = 0;
  inv_scale = at::Tensor();
  has_foreign = false;
  foreign_counts.clear();
  norm_factor = at::Tensor();
  norm = at::Tensor();
  clip_coef = at::Tensor();
  clip_value.reset();
  earlier_flags.clear();
  earlier_counts.clear();
  clips_due = false;
  return std::exchange(pass, nullptr);
}

at::Tensor OptimizerRecord::known_norm() {
  if (norm.defined()) {
    return norm;
  }
  if (pass == nullptr || has_foreign || !pass->has_norm()) {
    return {};
  }
  if (const auto known = pass->host_norm(); known && !norm_factor.defined()) {
    return buffers.norm_of(*known);
  }
  const auto known = pass->total_norm(at::kFloat);
  return norm_factor.defined() ? known * on_device(norm_factor, known.device(), at::kFloat) : known;
}

Counts OptimizerRecord::counts() const {
  Counts all = pass == nullptr ? earlier_counts : Counts();
  if (pass != nullptr) {
    for (const auto& device : pass->devices()) {
      if (device.counts != nullptr) {
        all.push_back(device.counts);
      }
    }
  }
  all.insert(all.end(), foreign_counts.begin(), foreign_counts.end());
  return all;
}

}  // namespace fastamp::scaler
