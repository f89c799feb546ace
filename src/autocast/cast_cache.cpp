// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_cache.h"

#include "autocast/data_cast.h"
#include "autocast/torch_state.h"
#include "core/interception.h"
#include "core/tensor_kind.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace fastamp::autocast {
constinit decltype(g_changed_weights) g_changed_weights;

void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights) {
  g_changed_weights.add(weights);
}

ChangedWeights changed_weights_since(std::uint64_t seen) { return g_changed_weights.since(seen); }

namespace {

constexpr std::size_t kFirstIndexSize = 64;

/// `p.data = x` may change only the sizes. Where sizes cannot be read, the version must suffice.
bool has_same_geometry(const at::Tensor& source, const at::Tensor& cast) {
  return !has_geometry(source) || !has_geometry(cast) ||
         (source.sizes() == cast.sizes() && source.strides() == cast.strides());
}

std::size_t hash(const c10::TensorImpl* key, c10::ScalarType to) {
  // Fibonacci hashing; the low four bits of an allocation's address carry nothing.
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
  const auto address = reinterpret_cast<std::uintptr_t>(key) >> 4U;
  return static_cast<std::size_t>(((address ^ static_cast<std::uintptr_t>(to)) * kGolden) >> 32U);
}

}  // namespace

bool CastCache::is_current(const Entry& entry, const at::Tensor& source) {
  return entry.source.matches(source) && has_same_geometry(source, entry.cast) &&
         entry.cast_version == version_of(entry.cast);
}

bool CastCache::has_usable_history(const Entry& entry, const at::Tensor& source) {
  // A cast made without grad mode would cut the weight off from its gradient.
  return entry.required_grad == source.requires_grad() &&
         (entry.made_with_grad || !c10::GradMode::is_enabled());
}

std::size_t CastCache::probe(const c10::TensorImpl* key, c10::ScalarType to) const {
  const std::size_t mask = index_.size() - 1;
  std::size_t slot = hash(key, to) & mask;
  while (index_[slot] != 0) {
    const Entry& entry = entries_[index_[slot] - 1];
    if (entry.source.key() == key && entry.to == to) {
      break;
    }
    slot = (slot + 1) & mask;
  }
  return slot;
}

CastCache::Entry* CastCache::find_entry(const at::Tensor& source, c10::ScalarType to) {
  if (seen_changes_ != count_changed_weights()) [[unlikely]] {
    forget_changed();
  }
  const std::uint32_t position = index_[probe(source.unsafeGetTensorImpl(), to)];
  if (position == 0) {
    return nullptr;
  }
  Entry& entry = entries_[position - 1];
  return is_current(entry, source) ? &entry : nullptr;
}

at::Tensor CastCache::find(const at::Tensor& source, c10::ScalarType to, CastUse use) {
  Entry* const entry = find_entry(source, to);
  if (entry == nullptr) {
    return {};
  }
  if (use == CastUse::kAsData) {
    entry->used = true;
    return entry->cast;
  }
  if (!entry->has_history) [[unlikely]] {
    if (!entry->order.has_value() && is_intercepted()) {
      return {};  // torch has no cast yet: what intercepts its ops is to see one.
    }
    give_history(*entry, source);
  } else if (!has_usable_history(*entry, source)) {
    return {};
  }
  entry->used = true;
  if (c10::InferenceMode::is_enabled() && entry->cast.requires_grad()) [[unlikely]] {
    // torch does not look for casts there: its own requires no gradient, which ops look at.
    const c10::InferenceMode normal_mode(false);
    return make_alias(entry->cast);
  }
  return entry->cast;
}

void CastCache::give_history(Entry& entry, const at::Tensor& source) {
  if (c10::InferenceMode::is_enabled()) {
    return;  // torch caches nothing there.
  }
  if (!entry.order.has_value()) {
    entry.order = take_node_order();
  }
  if (!c10::GradMode::is_enabled()) {
    if (source.requires_grad() && !entry.cast.requires_grad() && weights_always_require_grad()) {
      entry.cast = make_alias(entry.cast);
      require_grad_alone(source, entry.cast);
    }
    return;
  }
  // An alias, since ops may have handed the tensor itself to the user.
  entry.cast = make_alias(entry.cast);
  entry.required_grad = source.requires_grad();
  entry.made_with_grad = true;
  entry.has_history = true;
  if (is_recorded(source)) {
    record_cast(source, entry.cast, *entry.order);
  }
}

std::vector<PlannedCast> CastCache::used_casts() const {
  std::vector<PlannedCast> used;
  for (const Entry& entry : entries_) {
    if (entry.used) {
      used.push_back({entry.source, entry.to});
    }
  }
  return used;
}

template <class Predicate>
void CastCache::drop_if(const Predicate& is_dropped) {
  // Destroyed last: the end of a cast may run user code that uses this cache.
  std::vector<Entry> dropped;
  std::vector<Entry> kept;
  dropped.reserve(entries_.size());  // Memory that fails later would lose what is moved already.
  kept.reserve(entries_.size());
  for (Entry& entry : entries_) {
    (is_dropped(entry) ? dropped : kept).push_back(std::move(entry));
  }
  entries_ = std::move(kept);
  rebuild_index(index_.size());
}

void CastCache::keep(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast,
                     CastUse use) {
  if (entries_.empty()) {
    seen_changes_ = count_changed_weights();
  }
  if (2 * (entries_.size() + 1) > index_.size()) {
    rebuild_index(std::max(kFirstIndexSize, 2 * index_.size()));
  }
  Entry entry{
      .source = TensorIdentity(source),
      .cast = cast,
      .cast_version = version_of(cast),
      .to = to,
      .required_grad = source.requires_grad(),
      .made_with_grad = c10::GradMode::is_enabled(),
      .has_history = use == CastUse::kByOp,
      .used = use != CastUse::kLater,
      .order = std::nullopt,
  };
  if (use == CastUse::kByOpUnrecorded) {
    entry.order = take_node_order();
  }
  std::uint32_t& position = index_[probe(entry.source.key(), to)];
  if (position != 0) {
    // Swapped: the old cast dies with `entry`, after the new one is in its place.
    std::swap(entries_[position - 1], entry);
    return;
  }
  entries_.push_back(std::move(entry));
  position = static_cast<std::uint32_t>(entries_.size());
  if (sweep_budget_.pays_for(entries_.size(), has_geometry(cast) ? cast.nbytes() : 0)) {
    drop_orphans();
  }
}

bool CastCache::is_orphan(const Entry& entry) {
  return entry.source.is_expired() || (entry.has_history && is_sole_user_of_source(entry.cast));
}

void CastCache::drop_orphans() {
  if (std::ranges::any_of(entries_, is_orphan)) {
    drop_if(is_orphan);
  }
}

void CastCache::forget_changed() {
  const auto changed = changed_weights_since(seen_changes_);
  seen_changes_ = changed.count;
  drop_if(
      [&](const Entry& entry) { return changed.all || changed.keys.contains(entry.source.key()); });
}

void CastCache::rebuild_index(std::size_t size) {
  index_.assign(size, 0);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    index_[probe(entries_[i].source.key(), entries_[i].to)] = static_cast<std::uint32_t>(i + 1);
  }
}

void CastCache::forget(const std::vector<const c10::TensorImpl*>& sources) {
  const std::unordered_set<const c10::TensorImpl*> keys(sources.begin(), sources.end());
  drop_if([&](const Entry& entry) { return keys.contains(entry.source.key()); });
}

void CastCache::clear() noexcept {
  if (entries_.empty()) {
    return;
  }
  std::vector<Entry> dying;
  dying.swap(entries_);
  std::ranges::fill(index_, 0U);
  dying.clear();
  if (entries_.capacity() == 0) {  // Else it was filled again meanwhile.
    entries_.swap(dying);          // Keeps the capacity.
  }
}

}  // namespace fastamp::autocast
