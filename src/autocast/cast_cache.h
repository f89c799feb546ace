#pragma once

#include "autocast/tensor_identity.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastamp::autocast {

/// The lower-precision casts of weights made by the regions of one thread.
///
/// A weight is used several times in a forward pass (tied weights, recurrent cells, gradient
/// checkpointing inside one region) and its cast costs a pass over its memory and an autograd node.
/// An entry is used again only while everything the cast depended on is as it was: the source's
/// version, memory and requires_grad, the grad mode, the CUDA stream and graph capture, and the
/// cast itself (an op may hand out a view of it that the user edits).
///
/// Entries lie densely in the order they were made; a hash index of open addressing, at most half
/// full, points into them, so that clearing costs the entries there are and not the table's size.
/// One instance per thread: no locks, and no other thread can empty it.
class CastCache {
 public:
  /// The cast of `source` to `to`, or nullptr if none can be used now.
  const at::Tensor* find(const at::Tensor& source, c10::ScalarType to) const;

  /// Keeps `cast`, made just now from `source`. `source` has an enabled version counter and a
  /// storage.
  void insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast);

  void clear() noexcept;
  bool empty() const { return entries_.empty(); }

 private:
  struct Entry {
    TensorIdentity source;
    at::Tensor cast;
    std::uint32_t cast_version;
    c10::ScalarType to;
    bool made_with_grad;
  };

  static bool is_usable(const Entry& entry, const at::Tensor& source);
  std::size_t probe(const c10::TensorImpl* key, c10::ScalarType to) const;
  void grow_index();

  std::vector<Entry> entries_;
  std::vector<std::uint32_t>
      index_;  ///< Position in entries_ plus one, 0 = free; size is a power of two.
};

/// Cast of a weight that this thread's cache holds and that can be used now, else nullptr.
const at::Tensor* find_weight_cast(const at::Tensor& source, c10::ScalarType to);

/// Keeps the cast of a weight if the end of the region it belongs to can be told.
void keep_weight_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast);

/// Called by every region of ours after it was entered and after it was left, with the number of
/// regions, torch's included, that are open on the thread now.
void on_region_entered(int open_regions);
void on_region_left(int open_regions) noexcept;
/// A cast of a recorded activation that shares the memory of an earlier one, without history; else
/// undefined.
at::Tensor find_activation_cast(const at::Tensor& source, c10::ScalarType to);

/// Lets later uses of a recorded activation share the memory of its cast.
void keep_activation_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast);

/// Drops this thread's casts.
void clear_thread_cache() noexcept;

}  // namespace fastamp::autocast
