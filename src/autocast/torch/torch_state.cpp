// SPDX-License-Identifier: Apache-2.0
#include "autocast/torch/torch_state.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>

namespace fastamp::autocast {

c10::ScalarType region_dtype(c10::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}

bool is_weight_cache_enabled() { return at::autocast::is_autocast_cache_enabled(); }

bool is_cached_by_torch(const at::Tensor& tensor) { return at::caching::is_cached_tensor(tensor); }

int region_depth() {
  // torch has no getter for the depth.
  const int depth = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  return depth;
}

bool in_region() {
  return region_depth() > 0 || at::autocast::is_autocast_enabled(c10::kCPU) ||
         at::autocast::is_autocast_enabled(c10::kCUDA);
}

}  // namespace fastamp::autocast
