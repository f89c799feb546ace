#pragma once

#include "autocast/cast_plans.h"
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
  const at::Tensor* find(const at::Tensor& source, c10::ScalarType to);

  /// Keeps `cast`, made just now from `source`. Both have an identity.
  /// @param used  Whether an op takes it now; false if it is made for later ones.
  void insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast, bool used);

  /// What was cast and used, in the order it was cast.
  std::vector<PlannedCast> used_casts() const;

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
    bool used;
  };

  static bool is_usable(const Entry& entry, const at::Tensor& source);
  std::size_t probe(const c10::TensorImpl* key, c10::ScalarType to) const;
  void grow_index();

  std::vector<Entry> entries_;
  /// Position in entries_ plus one, 0 = free; the size is a power of two.
  std::vector<std::uint32_t> index_;
};

}  // namespace fastamp::autocast
