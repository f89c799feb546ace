#pragma once

#include "autocast/cache/cast_plans.h"
#include "autocast/make/cast_node.h"
#include "autocast/make/tensor_identity.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp::autocast {

/// Who takes a cast that is put into the cache.
enum class CastUse : std::uint8_t {
  by_op,             ///< An op, now; what history it has was recorded.
  by_op_unrecorded,  ///< An op, now, while grad mode is off.
  as_data,           ///< An op that takes its data alone, now.
  later,             ///< Nobody yet.
};

/// The lower-precision casts of weights made by the regions of one thread.
///
/// A weight is used several times in a forward pass (tied weights, recurrent cells, gradient
/// checkpointing inside one region) and its cast costs a pass over its memory and an autograd node.
/// An entry is used again only while everything the cast depended on is as it was: the source's
/// version, memory and requires_grad, the grad mode, the CUDA stream and graph capture, and the
/// cast itself (an op may hand out a view of it that the user edits). Those of weights that
/// somebody said were changed are forgotten at the next use of the cache.
///
/// A cast that no op has taken with grad mode on has no history yet: it would keep the weight alive
/// for nothing. The first such op records it, at the place among the thread's nodes that the first
/// op to take it came at, whatever the grad mode: gradients are then summed in torch's order.
///
/// Entries lie densely in the order they were made; a hash index of open addressing, at most half
/// full, points into them, so that clearing costs the entries there are and not the table's size.
/// One instance per thread: no locks, and no other thread can empty it.
///
/// With a cast the last reference to its weight may go, and code of others run that uses this same
/// cache. Casts are therefore destroyed when they are out of it, and handed out as tensors, never
/// as places in it.
class CastCache {
 public:
  /// The cast of `source` to `to`, with its history, or an undefined tensor if none can be used
  /// now.
  at::Tensor find(const at::Tensor& source, c10::ScalarType to);

  /// The same for its data alone, with or without a history.
  at::Tensor find_data(const at::Tensor& source, c10::ScalarType to);

  /// Keeps `cast`, made just now from `source`. Both have an identity.
  void insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast, CastUse use);

  /// What was cast and used, in the order it was cast.
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
    std::optional<NodeOrder> order;  ///< Of the history that it is still to get.
  };

  Entry* find_entry(const at::Tensor& source, c10::ScalarType to);
  static bool is_current(const Entry& entry, const at::Tensor& source);
  static bool has_usable_history(const Entry& entry, const at::Tensor& source);
  static void give_history(Entry& entry, const at::Tensor& source);
  std::size_t probe(const c10::TensorImpl* key, c10::ScalarType to) const;
  void rebuild_index(std::size_t size);
  [[gnu::noinline, gnu::cold]] void forget_changed();
  template <class Predicate>
  void drop_if(const Predicate& is_dropped);

  std::vector<Entry> entries_;
  /// Position in entries_ plus one, 0 = free; the size is a power of two.
  std::vector<std::uint32_t> index_;
  std::uint64_t seen_changes_ = 0;  ///< Of changed_weights.h: entries are good up to there.
};

}  // namespace fastamp::autocast
