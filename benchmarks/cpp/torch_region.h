// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/autocast_mode.h>

/// The steps of torch.autocast's __enter__ and __exit__ on a CPU: LibTorch has no guard of its own.
class TorchRegion {
 public:
  explicit TorchRegion(at::ScalarType dtype) {
    at::autocast::set_autocast_enabled(kDevice, true);
    at::autocast::set_autocast_dtype(kDevice, dtype);
    at::autocast::increment_nesting();
    at::autocast::set_autocast_cache_enabled(true);
  }
  ~TorchRegion() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(kDevice, enabled_);
    at::autocast::set_autocast_dtype(kDevice, dtype_);
    at::autocast::set_autocast_cache_enabled(cached_);
  }
  TorchRegion(const TorchRegion&) = delete;
  TorchRegion& operator=(const TorchRegion&) = delete;
  TorchRegion(TorchRegion&&) = delete;
  TorchRegion& operator=(TorchRegion&&) = delete;

 private:
  static constexpr auto kDevice = at::kCPU;
  bool enabled_ = at::autocast::is_autocast_enabled(kDevice);
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(kDevice);
  bool cached_ = at::autocast::is_autocast_cache_enabled();
};
