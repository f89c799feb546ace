// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <fastamp/macros.h>

#include <ATen/core/TensorBody.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fastamp::autocast {

/// Uses of one weight in a region.
struct WeightUse {
  bool is_used = false;
  /// The first op that got the weight itself, and not its cast to the region's dtype; empty if
  /// there was none. Only then can the cast take the weight's place.
  std::string read_by;
  /// Number of times that autocast is to cast the weight itself, for which a region has one cast,
  /// and so one node that sums the gradients of all these uses.
  int casts = 0;
  /// Number of times that it, or the program, casts a view of the weight or the weight once more.
  int other_casts = 0;
};

/// Watches which ops read weights on this thread, from construction to destruction.
///
/// A use counts as one of the cast if autocast is going to cast the weight for an op of policy
/// `lower`, if the op is a cast to the region's dtype, or if it only makes a view, whose uses count
/// as the weight's. All other uses, such as those by composite ops without a policy, count as reads
/// of the weight itself, whatever becomes of it inside. Tensors are distinguished by their storage,
/// so a weight and all views of it are one. Uses that call no op of torch are not seen.
///
/// At most one at a time on a thread; must end on the thread that made it.
class FASTAMP_API WeightUses {
 public:
  /// @param weights  Tensors with storage; they must outlive the object.
  explicit WeightUses(const std::vector<at::Tensor>& weights);
  ~WeightUses();

  WeightUses(const WeightUses&) = delete;
  WeightUses& operator=(const WeightUses&) = delete;
  WeightUses(WeightUses&&) = delete;
  WeightUses& operator=(WeightUses&&) = delete;

  /// Uses in the order of the weights.
  std::vector<WeightUse> uses() const;

  /// Effect of a call of an op on a weight.
  enum class Reading : std::uint8_t {
    kNone,  ///< No weight is among its inputs, or autocast casts those that are.
    kCast,  ///< Casts one to the region's dtype: what the op calls inside reads no weight.
    kView,  ///< Makes a view of one: strides are set inside.
    kRead,  ///< Reads it.
  };

  /// Notes the weights among the inputs of an op that is about to run.
  Reading see(const at::RecordFunction& call);

  /// Calls of this thread: of those that have begun and not ended, those that cast and make views.
  // NOLINTBEGIN(cppcoreguidelines-non-private-member-variables-in-classes): observers count them
  int casts_begun = 0;
  int views_begun = 0;
  // NOLINTEND(cppcoreguidelines-non-private-member-variables-in-classes)

 private:
  Reading reading_of(const at::RecordFunction& call, const c10::FunctionSchema& schema,
                     const at::Tensor& weight) const;

  /// Index into uses_; weights that share a storage share it.
  std::unordered_map<const void*, std::size_t> index_of_storage_;
  std::vector<std::size_t> index_of_weight_;
  std::unordered_set<const c10::TensorImpl*> weights_;
  std::vector<WeightUse> uses_;
  std::unordered_map<std::string, OpId> ids_;
  at::CallbackHandle callback_;
};

}  // namespace fastamp::autocast
