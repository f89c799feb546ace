// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast_cache.h"
#include "autocast/cast_plans.h"
#include "autocast/float8_interface.h"
#include "autocast/tensor_identity.h"
#include "float8/float8_cast.h"

#include <fastamp/autocast/kept_casts.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

// Casts to fp8 that are kept: of weights for a region or beyond, and of the last activation.
namespace fastamp::autocast {

/// The fp8 cast of a tensor, and what it was made of.
class Float8Entry {
 public:
  /// @param as_cast  The source's identity before it was read: another thread may have written it
  ///                 since.
  Float8Entry(const at::Tensor& source, TensorIdentity as_cast, c10::ScalarType to,
              Float8Cast cast);

  /// Whether this is the cast of the source as it is now: its version, memory, sizes, stream and
  /// capture are as they were, and nobody has edited the cast, which hooks on saved tensors see.
  bool is_current(const at::Tensor& source, c10::ScalarType to) const;
  /// The cast, if it is current and has the layouts.
  std::optional<Float8Cast> find(const at::Tensor& source, c10::ScalarType to,
                                 Float8Wanted wanted) const;

  Float8Cast cast() && { return std::move(cast_); }
  c10::ScalarType to() const { return to_; }
  bool is_of_dead_tensor() const { return source_.is_expired(); }
  std::size_t bytes() const;

  /// Notes that a product takes these layouts.
  void note_use(Float8Wanted layouts);

  /// Returns what was cast, in the layouts that were taken; nullopt if none was.
  std::optional<PlannedCast> as_used() const;

 private:
  std::array<std::uint32_t, 2> cast_versions() const;

  TensorIdentity source_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  c10::ScalarType to_;
  Float8Cast cast_;
  std::array<std::uint32_t, 2> versions_;
  Float8Wanted used_;
};

/// fp8 casts of weights, one for each. Beside CastCache, whose entries are tensors with a history:
/// these have none, since the node of the product leads to the weight. What is taken out is
/// returned, so that its owner decides where tensors are destroyed.
class Float8Casts {
 public:
  using Keys = std::vector<const c10::TensorImpl*>;
  using Node = std::unordered_map<const c10::TensorImpl*, Float8Entry>::node_type;

  /// The cast of a weight, if it is current and has what is wanted.
  std::optional<Float8Cast> find(const at::Tensor& weight, c10::ScalarType to,
                                 Float8Wanted wanted) const;

  /// Does so, and notes that a product takes it.
  std::optional<Float8Cast> use(const at::Tensor& weight, c10::ScalarType to, Float8Wanted wanted);

  /// The casts that products took, in no order.
  std::vector<PlannedCast> used() const;

  /// Keeps an entry of a weight and returns the weight's earlier one.
  [[nodiscard]] std::optional<Float8Entry> replace(const at::Tensor& weight, Float8Entry entry);

  /// Takes out the entries of some weights, which may be dead.
  [[nodiscard]] std::vector<Float8Entry> take(const Keys& weights);
  /// Takes out the entry of one weight, which needs no memory; empty if there is none.
  [[nodiscard]] Node take(const c10::TensorImpl* weight) noexcept {
    return entries_.extract(weight);
  }
  [[nodiscard]] Float8Casts take_all();
  /// Takes out those of weights that are gone.
  [[nodiscard]] std::vector<Float8Entry> take_dead();

  bool empty() const { return entries_.empty(); }
  std::size_t size() const { return entries_.size(); }
  std::size_t bytes() const;

 private:
  std::unordered_map<const c10::TensorImpl*, Float8Entry> entries_;
};

/// The fp8 casts that the regions of one thread share: those of weights, and the one of the last
/// activation, which often feeds several products (query, key and value; gate and up). That one is
/// kept alive until another activation is cast or the region ends.
class RegionFloat8Casts {
 public:
  /// Begins at the first cast of a region, as CastPlans::begin().
  std::vector<WeightToCast> begin(const at::Tensor& weight, c10::ScalarType to) {
    return plans_.begin(weight, to);
  }

  std::optional<Float8Cast> find_weight(const at::Tensor& weight, c10::ScalarType to,
                                        Float8Wanted wanted);
  void keep_weight(const at::Tensor& weight, Float8Entry entry);

  std::optional<Float8Cast> find_activation(const at::Tensor& activation, c10::ScalarType to,
                                            Float8Wanted wanted) const;
  void keep_activation(Float8Entry entry);

  /// Drops the casts of some weights, which may be dead.
  void forget(const Float8Casts::Keys& weights);

  /// Ends the region: what products took is the plan of the next one like it.
  void clear() noexcept;
  bool empty() const { return weights_.empty() && !activation_.has_value(); }

 private:
  void forget_changed();

  CastPlans plans_;
  Float8Casts weights_;
  SweepBudget sweep_budget_;
  std::optional<Float8Entry> activation_;
  std::uint64_t seen_changes_ = 0;  ///< Changes (change_log.h) that weights_ reflects.
};

// The next five are of this thread's regions.

/// The cast of a weight that is kept, can be used now and has what is wanted.
std::optional<Float8Cast> find_float8_cast(const at::Tensor& weight, c10::ScalarType to,
                                           Float8Wanted wanted);

/// Keeps the cast of a weight if it is possible to know when its region ends.
/// @param used  The layouts that a product takes now.
void keep_float8_cast(const at::Tensor& weight, c10::ScalarType to, const Float8Cast& cast,
                      Float8Wanted used);

/// These two for the last activation with a history. (Others may be buffers whose memory is
/// written behind torch's back, as recent_casts.h says.)
std::optional<Float8Cast> find_float8_activation(const at::Tensor& activation, c10::ScalarType to,
                                                 Float8Wanted wanted);
void keep_float8_activation(const at::Tensor& activation, c10::ScalarType to,
                            const Float8Cast& cast);

/// Begins at the first cast of a region to fp8, as begin_planned_region() for 16 bits.
std::vector<WeightToCast> begin_planned_float8_region(const at::Tensor& weight, c10::ScalarType to);

/// Casts that outlive regions, of weights that are requested of the KeptCastStore. One for the
/// process; each call takes a lock, and while holding it runs no op and destroys no tensor and no
/// reference to one.
class KeptFloat8Casts {
 public:
  static KeptFloat8Casts& instance();

  /// The cast of a weight as it is now, with what is wanted. Its tensors are the store's own: they
  /// have no history, and nothing of fastamp writes them.
  std::optional<Float8Cast> find(const at::Tensor& weight, c10::ScalarType to,
                                 Float8Wanted wanted) const;

  /// Keeps the cast of a weight, if it is requested; it replaces an earlier one.
  void insert(const at::Tensor& weight, Float8Entry entry);

  /// Takes the cast of a weight out, up to date or not, so that it cannot be found while it is
  /// written.
  std::optional<Float8Entry> take_out(const at::Tensor& weight);

  void drop();
  void drop(const c10::TensorImpl* weight) noexcept;
  KeptCasts count() const;

 private:
  mutable std::mutex mutex_;
  Float8Casts casts_;
};

}  // namespace fastamp::autocast
