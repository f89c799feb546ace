// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastamp {

/// Keeps the lower-precision casts of weights from one region to the next, for frozen weights,
/// inference and gradient accumulation: a weight is then cast again only after it changed.
///
/// For weights in training, autocast_dtype of fastamp::optim's optimizers is the better choice.
///
/// Works for float32 tensors that are not views, whether they require gradients or not. A kept cast
/// is used only while the weight's version counter, memory and sizes are as they were; every region
/// gives it an autograd node of its own, so gradients are the same bit for bit. It costs the memory
/// of one lower-precision copy per weight, dtype and CUDA stream; see kept_casts(). A copy is freed
/// when it is out of date, when its weight was freed (at the latest 16 regions or copies later), on
/// drop_kept_casts(), and when the last object that keeps it is destroyed.
///
/// @warning A weight that is written without moving its version counter (by the step() of
/// LibTorch's own optimizers, through `.data()` or a raw pointer, by a CUDA graph, by a collective)
/// is used with its OLD value until weights_changed() or drop_kept_casts(). GradScaler::step()
/// calls the former after every step that is not fastamp's, also where it is disabled.
///
/// Process-wide: all threads use the same copies. Thread-safe.
class FASTAMP_API KeepCastsGuard {
 public:
  /// @param weights  For example module->parameters(). Tensors whose casts autocast cannot keep are
  ///                 accepted and cast as usual.
  explicit KeepCastsGuard(const std::vector<at::Tensor>& weights);
  ~KeepCastsGuard();

  KeepCastsGuard(const KeepCastsGuard&) = delete;
  KeepCastsGuard& operator=(const KeepCastsGuard&) = delete;
  KeepCastsGuard(KeepCastsGuard&&) = delete;
  KeepCastsGuard& operator=(KeepCastsGuard&&) = delete;

  /// Ends it early. Does nothing the second time.
  void release() const;

 private:
  std::uint64_t id_;
};

/// Numbers of the casts that are kept now.
struct KeptCasts {
  std::size_t copies = 0;   ///< Copies of weights.
  std::uint64_t bytes = 0;  ///< Their size.
};

/// The copies kept in the process now. Thread-safe.
FASTAMP_API KeptCasts kept_casts();

/// Drops all kept copies, or those of some weights: the next use casts again. Needed after writing
/// a weight in a way that its version counter does not show. Thread-safe.
FASTAMP_API void drop_kept_casts();
FASTAMP_API void drop_kept_casts(const std::vector<at::Tensor>& weights);

}  // namespace fastamp
