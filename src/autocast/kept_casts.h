// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/tensor_identity.h"
#include "autocast/weight_requests.h"

#include <fastamp/autocast/kept_casts.h>
#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace fastamp::autocast {

/// Casts of weights that outlive regions on request. One store for the process; each call takes a
/// lock, and while holding it runs no op and destroys no tensor and no reference to one. The casts
/// to fp8 lie with src/float8, which asks here for what is requested, and are dropped from here.
///
/// A cast in here has no autograd history and is handed out as an alias: a tensor of its own over
/// the same memory, to which the region that uses it gives a history. Alias and cast share a
/// version counter, so that an edit of one ends the use of the other.
class FASTAMP_API KeptCastStore {
 public:
  static KeptCastStore& instance();

  /// Whether any weight is requested: all that is read while the store is not in use.
  bool is_used() const { return used_.load(std::memory_order_relaxed); }

  /// Weights whose casts are to be kept from now until release(id).
  std::uint64_t acquire(const std::vector<at::Tensor>& weights);
  void release(std::uint64_t id) noexcept;
  /// Adds a weight to those of an acquire(), unless it is among them.
  void add(std::uint64_t id, const at::Tensor& weight);
  bool is_requested(const at::Tensor& weight) const;

  /// An alias of the kept cast of `source` as it is now, or an undefined tensor.
  at::Tensor find(const at::Tensor& source, c10::ScalarType to) const;

  /// An alias of the memory kept for a cast of `source`, up to date or not, or an undefined tensor.
  at::Tensor find_memory(const at::Tensor& source, c10::ScalarType to) const;

  /// Keeps `cast`, which has no history, as that of a requested weight; it replaces casts that are
  /// out of date.
  /// @param as_cast  The source's identity before it was read: another thread may have written it
  ///                 since.
  void keep(const at::Tensor& source, TensorIdentity as_cast, c10::ScalarType to,
            const at::Tensor& cast);

  struct Taken {
    at::Tensor cast;  ///< Undefined if there is none in this execution context.
    bool is_current =
        false;  ///< It is the cast of the source as it is now, and nothing else refers to it.
  };

  /// Takes the kept cast of `source` out, so that it cannot be found while it is written.
  Taken take_out(const at::Tensor& source, c10::ScalarType to);

  void drop();
  /// Needs no memory.
  void drop(const std::vector<const c10::TensorImpl*>& weights) noexcept;
  KeptCasts count();

  /// Frees the casts of weights that are gone; called at the end of regions, and for each cast that
  /// is kept, since a region may be as long as the program. Works at every 16th call.
  void sweep_sometimes() noexcept;

 private:
  struct Entry {
    TensorIdentity source;
    at::Tensor cast;
    std::uint32_t cast_version;
    c10::ScalarType to;
  };

  static bool is_current(const Entry& entry, const at::Tensor& source);
  const Entry* find_entry(const at::Tensor& source, c10::ScalarType to) const;
  void drop(const c10::TensorImpl* weight) noexcept;
  void drop(const WeightRequests::Weights& weights) noexcept;
  WeightRequests::Weights take_dead_sometimes();
  void note_use() { used_.store(!requests_.empty(), std::memory_order_relaxed); }

  mutable std::mutex mutex_;
  std::atomic<bool> used_{false};
  std::uint32_t sweeps_asked_for_ = 0;
  std::unordered_map<const c10::TensorImpl*, std::vector<Entry>> entries_;
  WeightRequests requests_;
};

// `runs_unchanged`: nothing but observers and Python's modes sees calls with the tensor.

/// Whether a cast of this tensor, whatever its dtype is, can outlive regions,
bool is_lasting(const at::Tensor& tensor, bool runs_unchanged);
/// and whether one to 16 bits can.
bool can_be_kept(const at::Tensor& tensor, bool runs_unchanged);

bool is_kept_weight_slow(const at::Tensor& tensor, bool runs_unchanged);

/// Whether the cast of this tensor is to outlive the region, and can, where casts are kept at all.
inline bool is_kept_weight(const at::Tensor& tensor, bool runs_unchanged) {
  return KeptCastStore::instance().is_used() && is_kept_weight_slow(tensor, runs_unchanged);
}

/// The weights of an optimizer, for forget_casts() after its step.
FASTAMP_API std::vector<const c10::TensorImpl*> keys_of_weights(
    const torch::optim::Optimizer& optimizer);
/// weights_changed() for weights that may be gone. Needs no memory.
FASTAMP_API void forget_casts(const std::vector<const c10::TensorImpl*>& weights) noexcept;

}  // namespace fastamp::autocast
