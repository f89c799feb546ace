#pragma once

#include "autocast/kept_cast_store.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fastamp::autocast {

/// Whether a cast of this tensor can outlive regions at all.
bool can_be_kept(const at::Tensor& tensor);

/// Whether work on this tensor is recorded into a CUDA graph now: each replay must do it again.
bool is_captured(const at::Tensor& tensor);

/// A cast without history, to be kept.
at::Tensor make_kept_cast(const at::Tensor& weight, c10::ScalarType to);

bool is_kept_weight_slow(const at::Tensor& tensor);

/// Whether the cast of this tensor is to outlive the region, and can.
inline bool is_kept_weight(const at::Tensor& tensor) {
  return KeptCastStore::instance().is_used() && is_kept_weight_slow(tensor);
}

/// A tensor over the memory of the kept cast of a weight, without history; the cast is made first
/// if there is none that can be used now.
at::Tensor find_or_make_kept_cast(const at::Tensor& weight, c10::ScalarType to);

}  // namespace fastamp::autocast
