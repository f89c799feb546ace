// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast_cache.h"
#include "core/interception.h"
#include "trace/events.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fastamp::autocast {

/// The store in which later uses of a tensor find its cast.
enum class CastStore : std::uint8_t {
  kNone,    ///< Nothing else uses the cast.
  kRegion,  ///< Of a weight, or of the weight that it views: later ops of the region find it.
  kKept,    ///< The same, and later regions find it, because that was requested.
  kRecent,  ///< Of an activation: other ops of the region share the memory of its cast.
};

/// Way in which the cast gets its autograd history.
enum class CastHistory : std::uint8_t {
  kNone,
  kRecorded,  ///< By a node that leads to the tensor.
  kAlone,     ///< By a node that leads nowhere: grad mode is off, and torch's cast of a weight
              ///< requires a gradient all the same.
  kByTorch,   ///< For the same reason, by the op `to` with grad mode on.
};

/// A tensor that is to be cast, and all that is known of it: found out once per cast, since each
/// question costs a few nanoseconds and has one answer until the op is called. Borrows the tensors.
struct CastSource {
  const at::Tensor& tensor;
  const at::Tensor* data;  ///< Whose data is cast: the tensor itself, or the weight that it views.
  CallPath path;           ///< Whether a cast of the tensor may be made below the dispatcher.
  CastStore store = CastStore::kNone;
  CastHistory history = CastHistory::kNone;
  CastEvent if_made = CastEvent::kOtherCast;  ///< What a trace counts if no store has the cast.
  CastUse use = CastUse::kAsData;             ///< How the op uses what the region keeps.
  bool region_keeps = false;                  ///< The region may keep the cast of `data`.
  bool in_inference = false;                  ///< It is of a weight, and inference mode is on.

  bool is_view() const { return data != &tensor; }
};

/// Uses that the cast of a tensor may have.
struct CastRules {
  bool lowers;         ///< It is to the region's dtype: only such casts are kept or shared.
  bool cache_enabled;  ///< Such casts may be kept now.
  bool shares;         ///< It may share memory with others, as cast() says.
};

/// Finds out all that the cast of a tensor depends on. Called by cast() alone.
CastSource classify(const at::Tensor& tensor, CastRules rules);

/// Whether a tensor is what torch finds worth keeping the cast of: a float32 parameter.
bool is_weight(const at::Tensor& tensor);

/// Returns the base of `tensor`, a view that is dense in memory, if both are ordinary and have the
/// same elements there, such as `weight.t()` or `weight.view({rows, -1})` of a weight. Else null.
///
/// Casting either one then writes the same bytes.
const at::Tensor* base_of_whole_view(const at::Tensor& tensor);

}  // namespace fastamp::autocast
