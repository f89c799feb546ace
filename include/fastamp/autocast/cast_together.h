#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastamp {

/// Casts the weights of a region together, on CUDA in one launch instead of one per weight.
///
/// The first weight that a region casts brings along those that the last region of the same thread
/// that began with this weight used. Only weights that lie where they lay then join; values, dtypes
/// and autograd nodes are those of separate casts. Weights that were not used fall out; nothing is
/// kept beyond a region.
///
/// @warning All weights are read when the FIRST one is used: a hook that fills a later weight in
/// place during the forward pass, on another stream or without moving its version counter, comes
/// too late. Not for weights that are sharded or offloaded in place.
///
/// Thread-safe. Holds from construction until release() or destruction.
class FASTAMP_API CastTogether {
 public:
  /// @param weights  Such as module->parameters(). Others are cast as ever.
  explicit CastTogether(const std::vector<at::Tensor>& weights);
  ~CastTogether();

  CastTogether(const CastTogether&) = delete;
  CastTogether& operator=(const CastTogether&) = delete;
  CastTogether(CastTogether&&) = delete;
  CastTogether& operator=(CastTogether&&) = delete;

  /// Ends it early. Does nothing the second time.
  void release();

 private:
  std::uint64_t id_;
};

}  // namespace fastamp
