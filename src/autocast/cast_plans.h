// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/float8_interface.h"
#include "autocast/tensor_identity.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

namespace fastamp::autocast {

/// A weight that a region cast, to what, and the layouts that it used if that is fp8.
struct PlannedCast {
  TensorIdentity weight;
  c10::ScalarType to;
  Float8Wanted wanted = {};
};

/// A weight to be cast with another one.
struct WeightToCast {
  at::Tensor weight;
  Float8Wanted wanted;  ///< Nothing if the cast is not to fp8.
};

/// Plans: which weights the regions of one thread use, so that the next region like an earlier one
/// can cast them together when it casts the first.
///
/// Regions are known by their first weight: a program that alternates between models (training
/// and evaluation, generator and discriminator) has a plan for each. A weight that a region did not
/// use leaves its plan. Keeps nothing alive.
class CastPlans {
 public:
  /// Begins a region whose first cast is that of `weight`; later calls of the region do nothing.
  /// Returns the other weights that the last region with this beginning used, if nothing but their
  /// values has changed since.
  std::vector<WeightToCast> begin(const at::Tensor& weight, c10::ScalarType to);

  /// Ends the region: `used` is what it cast and used. Does nothing if no region was begun.
  void end(std::vector<PlannedCast> used);

  bool is_begun() const { return begun_; }

 private:
  /// Models that one thread alternates between; with more, the oldest plan is forgotten.
  static constexpr std::size_t kMaxPlans = 8;

  struct Plan {
    PlannedCast first;
    std::vector<PlannedCast> casts;
  };

  std::vector<Plan>::iterator find(const c10::TensorImpl* key, c10::ScalarType to);

  std::vector<Plan> plans_;  ///< The most recently used one is last.
  bool begun_ = false;
  const c10::TensorImpl* first_key_ = nullptr;
  c10::ScalarType first_to_ = c10::ScalarType::Undefined;
};

}  // namespace fastamp::autocast
