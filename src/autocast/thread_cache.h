// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast_cache.h"
#include "autocast/cast_plans.h"
#include "autocast/float8_interface.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <vector>

// The casts that the regions of the calling thread keep or share. A thread that ends drops them;
// ops that run on it after that are cast without a cache.
namespace fastamp::autocast {

struct ThreadCache;

// The next five count on is_weight_cache_enabled().

/// Cast of a weight that this thread's cache holds and that can be used now, else undefined.
/// @param use  As CastCache::find() takes it.
at::Tensor find_weight_cast(const at::Tensor& source, c10::ScalarType to, CastUse use);

/// Whether the cast of a tensor can be kept for a region: it has an identity, of which its contents
/// are all there is.
bool is_keepable(const at::Tensor& source);

/// Keeps the cast of a tensor that is keepable, if it is possible to know when its region ends and
/// the cast has an identity.
void keep_weight_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast,
                      CastUse use);

/// A cast of a dense and recorded activation that has an identity, over the memory of an earlier
/// one and without history; else undefined.
at::Tensor find_recent_cast(const at::Tensor& activation, c10::ScalarType to);

/// Lets later uses of such an activation share the memory of its cast.
void keep_recent_cast(const at::Tensor& activation, c10::ScalarType to, const at::Tensor& cast);

/// Begins at the first cast of a weight in a region: the other weights that this thread's last
/// region with the same first weight cast to this dtype and used, except those whose storage has
/// moved. Empty after that. Called for weights whose casts the region may keep.
std::vector<WeightToCast> begin_planned_region(const at::Tensor& weight, c10::ScalarType to);

/// The fp8 casts of this thread's regions, if casts are kept, there are any and their region goes
/// on; else null.
RegionFloat8Casts* usable_float8_casts();

/// Returns it to keep another one in, made if there are none; null where casts are not kept, or it
/// is not possible to know when the region ends.
RegionFloat8Casts* float8_casts_to_fill();

/// Makes what the end of a region needs, and returns what on_region_entered() needs, null at the
/// end of the thread; called before a region is entered.
ThreadCache* prepare_thread_cache();
/// Called by each region of fastamp after entering and after leaving, with the number of regions,
/// torch's included, that are now open on the thread. The second returns whether the casts of the
/// thread's regions ended with this one.
void on_region_entered(ThreadCache* cache, int open_regions) noexcept;
bool on_region_left(int open_regions) noexcept;

/// Whether this thread has casts of weights that a region made.
FASTAMP_API bool has_weight_casts() noexcept;

/// Drops this thread's casts of some weights, which may be dead.
FASTAMP_API void forget_weight_casts(const std::vector<const c10::TensorImpl*>& weights);

/// Drops this thread's casts.
void clear_thread_cache() noexcept;

}  // namespace fastamp::autocast
