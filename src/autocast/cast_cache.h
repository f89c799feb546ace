// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast_node.h"
#include "autocast/cast_plans.h"
#include "autocast/tensor_identity.h"
#include "core/change_log.h"
#include "core/system_threads.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp::autocast {

// Weights that were reported as written without their version counters moving; each thread has to
// forget their casts. (Moving the counters instead would make the backward pass of a graph that
// saved such a weight raise an error that LibTorch's program never had. Forgetting all casts of a
// thread would cast untouched weights twice, and their gradients would be summed in another order,
// depending on when the other thread stepped.)

constexpr std::size_t kRememberedWeights = 1U << 14U;

/// A weight may be gone and another one have its address: that one is then cast once more.
extern ChangeLog<SystemThreads, const c10::TensorImpl*, kRememberedWeights> g_changed_weights;

using ChangedWeights = decltype(g_changed_weights)::Changes;

/// Number of reports so far. Read at every use of a cache, and hardly ever written.
inline std::uint64_t count_changed_weights() { return g_changed_weights.count(); }

/// Reports some weights. Thread-safe.
void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights);

/// The weights reported after the first `seen`. Thread-safe.
ChangedWeights changed_weights_since(std::uint64_t seen);

/// Decides when a cache looks through its casts for those of tensors that are gone.
///
/// Nothing shows when a tensor dies. So each new cast pays for a few looks, and a large one, which
/// takes longer to make, for more: looking never costs a noticeable part of casting, and the memory
/// of dead casts stays below some 16 KiB for each cast that the cache holds, plus a few casts.
class SweepBudget {
 public:
  /// Counts a new cast. Returns whether all `entries` are to be looked through now.
  bool pays_for(std::size_t entries, std::size_t cast_bytes) {
    constexpr std::size_t kLooksPerCast = 4;
    constexpr std::size_t kBytesPerLook = 16384;
    looks_ += kLooksPerCast + cast_bytes / kBytesPerLook;
    if (looks_ < entries) {
      return false;
    }
    looks_ = 0;
    return true;
  }

 private:
  std::size_t looks_ = 0;
};

/// The use of a cast that is looked for in the cache; the first one of a cast that is put there.
enum class CastUse : std::uint8_t {
  kByOp,            ///< By an op, now, which has recorded its history, if any.
  kByOpUnrecorded,  ///< By an op, now, while grad mode is off.
  kAsData,          ///< By an op that takes its data alone, now.
  kLater,           ///< By none yet.
};

/// The lower-precision casts of weights made by the regions of one thread.
///
/// A weight is used several times in a forward pass (tied weights, recurrent cells, gradient
/// checkpointing inside one region) and its cast costs a pass over its memory and an autograd node.
/// An entry is used again only while everything the cast depended on is as it was: the source's
/// version, memory and requires_grad, the grad mode, the CUDA stream and graph capture, and the
/// cast itself (an op may hand out a view of it that the user edits). Casts of weights that were
/// reported as changed are forgotten at the next use of the cache.
///
/// A cast that no op has taken with grad mode on has no history yet: it would keep the weight alive
/// for nothing. The first such op records it, with the NodeOrder that was reserved when the first
/// op took the cast, whatever the grad mode was: gradients are then summed in torch's order.
///
/// A transform of torch.func hands autocast a wrapper of each tensor that it is given, even of one
/// that it does not differentiate. The cast of a wrapper is wrapped for the same transform and ends
/// with it: no op is given a wrapper after that.
///
/// A cast of a tensor that nothing else holds any more is dropped while others are inserted: a
/// region may be as long as the program, and cast new leaves in every iteration.
///
/// Entries are stored densely in the order of their creation; an open-addressing hash index, at
/// most half full, points into them. Clearing thus costs the entries, not the size of the index.
/// One instance per thread: no locks, and no other thread can empty it.
///
/// Destroying a cast may drop the last reference to its weight, and so run user code that uses this
/// same cache. Casts are therefore destroyed after they have left it, and are handed out as
/// tensors, never as references into it.
class CastCache {
 public:
  /// The cast of `source` to `to`, or an undefined tensor if none can be used now.
  /// @param use  `by_op`: with its history; `as_data`: with or without one.
  at::Tensor find(const at::Tensor& source, c10::ScalarType to, CastUse use);

  /// Keeps `cast`, made just now from `source`. Both have an identity. Casts that only the cache
  /// still has a use for may be dropped, which may run user code.
  void keep(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast, CastUse use);

  /// The casts that were used, in the order in which they were made.
  std::vector<PlannedCast> used_casts() const;

  /// Drops the casts of some tensors, which may be dead.
  void forget(const std::vector<const c10::TensorImpl*>& sources);

  void clear() noexcept;
  bool empty() const { return entries_.empty(); }

 private:
  struct Entry {
    TensorIdentity source;
    at::Tensor cast;
    std::uint32_t cast_version;
    c10::ScalarType to;
    bool required_grad;
    bool made_with_grad;
    bool has_history;
    bool used;
    std::optional<NodeOrder> order;  ///< Reserved for a history that is not recorded yet.
  };

  Entry* find_entry(const at::Tensor& source, c10::ScalarType to);
  static bool is_current(const Entry& entry, const at::Tensor& source);
  static bool has_usable_history(const Entry& entry, const at::Tensor& source);
  static void give_history(Entry& entry, const at::Tensor& source);
  std::size_t probe(const c10::TensorImpl* key, c10::ScalarType to) const;
  void rebuild_index(std::size_t size);
  static bool is_orphan(const Entry& entry);
  [[gnu::noinline]] void drop_orphans();
  [[gnu::noinline, gnu::cold]] void forget_changed();
  template <class Predicate>
  void drop_if(const Predicate& is_dropped);

  std::vector<Entry> entries_;
  /// Position in entries_ plus one, 0 = free; the size is a power of two.
  std::vector<std::uint32_t> index_;
  SweepBudget sweep_budget_;
  std::uint64_t seen_changes_ = 0;  ///< Changes that the entries reflect.
};

}  // namespace fastamp::autocast
