// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastamp {

/// Casts the weights of a region together, on CUDA in one launch instead of one per weight. Those
/// that the region casts to fp8 are cast by two, apart from the others.
///
/// The first weight that a region casts brings along those of the last region on this thread that
/// began with the same weight. Only weights whose storage has not moved since then join; values,
/// dtypes and autograd nodes are those of separate casts. A weight that a region did not use is not
/// cast ahead by the next one; nothing is kept beyond a region.
///
/// @warning All weights are read when the FIRST one is used: a hook that fills a later weight in
/// place during the forward pass, on another stream or without moving its version counter, comes
/// too late. Not for weights that are sharded or offloaded in place.
///
/// Thread-safe. Holds from construction until release() or destruction.
class FASTAMP_API CastTogetherGuard {
 public:
  /// @param weights  For example module->parameters(). All other weights are cast as usual.
  explicit CastTogetherGuard(const std::vector<at::Tensor>& weights);
  ~CastTogetherGuard();

  CastTogetherGuard(const CastTogetherGuard&) = delete;
  CastTogetherGuard& operator=(const CastTogetherGuard&) = delete;
  CastTogetherGuard(CastTogetherGuard&&) = delete;
  CastTogetherGuard& operator=(CastTogetherGuard&&) = delete;

  /// Ends it early. Does nothing the second time.
  void release();

 private:
  std::uint64_t id_;
};

}  // namespace fastamp
