#include "autocast/kept_cast_store.h"

#include "autocast/alias.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace fastamp::autocast {

KeptCastStore& KeptCastStore::instance() {
  // Never destroyed: other threads may run ops while the process exits.
  static auto* store = new KeptCastStore;
  return *store;
}

std::uint64_t KeptCastStore::acquire(const std::vector<at::Tensor>& weights) {
  const std::scoped_lock lock(mutex_);
  const auto id = wanted_.acquire(weights);
  note_use();
  return id;
}

void KeptCastStore::release(std::uint64_t id) {
  Dropped dropped;
  const std::scoped_lock lock(mutex_);
  dropped = take(wanted_.release(id));
  note_use();
}

void KeptCastStore::add(std::uint64_t id, const at::Tensor& weight) {
  const std::scoped_lock lock(mutex_);
  wanted_.add(id, weight);
  note_use();
}

KeptCastStore::Dropped KeptCastStore::take(WantedWeights::Forgotten weights) {
  auto entries = take(weights.unwanted);
  return {std::move(weights), std::move(entries)};
}

std::vector<KeptCastStore::Entry> KeptCastStore::take(const WantedWeights::Keys& weights) {
  std::vector<Entry> taken;
  for (const auto* weight : weights) {
    const auto entries = entries_.find(weight);
    if (entries != entries_.end()) {
      std::ranges::move(entries->second, std::back_inserter(taken));
      entries_.erase(entries);
    }
  }
  return taken;
}

bool KeptCastStore::is_wanted(const at::Tensor& weight) const {
  const std::scoped_lock lock(mutex_);
  return wanted_.contains(weight.unsafeGetTensorImpl());
}

const KeptCastStore::Entry* KeptCastStore::find_entry(const at::Tensor& source,
                                                      c10::ScalarType to) const {
  const auto entries = entries_.find(source.unsafeGetTensorImpl());
  if (entries == entries_.end()) {
    return nullptr;
  }
  const auto entry = std::ranges::find_if(entries->second, [&](const Entry& candidate) {
    return candidate.to == to && candidate.source.is_in_same_context(source) &&
           candidate.cast.sizes() == source.sizes() && candidate.cast.strides() == source.strides();
  });
  return entry == entries->second.end() ? nullptr : &*entry;
}

bool KeptCastStore::is_current(const Entry& entry, const at::Tensor& source) {
  return entry.source.matches(source) && entry.cast_version == version_of(entry.cast);
}

at::Tensor KeptCastStore::find(const at::Tensor& source, c10::ScalarType to) const {
  const std::scoped_lock lock(mutex_);
  const Entry* entry = find_entry(source, to);
  const bool is_usable = entry != nullptr && is_current(*entry, source);
  return is_usable ? make_alias(entry->cast) : at::Tensor();
}

at::Tensor KeptCastStore::find_memory(const at::Tensor& source, c10::ScalarType to) const {
  const std::scoped_lock lock(mutex_);
  const Entry* entry = find_entry(source, to);
  return entry == nullptr ? at::Tensor() : make_alias(entry->cast);
}

KeptCastStore::Taken KeptCastStore::take_out(const at::Tensor& source, c10::ScalarType to) {
  Taken taken;
  std::optional<Entry> dropped;
  const std::scoped_lock lock(mutex_);
  const Entry* entry = find_entry(source, to);
  if (entry == nullptr) {
    return taken;
  }
  taken.is_current = is_current(*entry, source) && entry->cast.storage().use_count() == 1;
  auto& entries = entries_[source.unsafeGetTensorImpl()];
  const auto position = entries.begin() + (entry - entries.data());
  dropped.emplace(std::move(*position));
  taken.cast = std::move(dropped->cast);
  entries.erase(position);
  return taken;
}

void KeptCastStore::insert(const at::Tensor& source, TensorIdentity as_cast, c10::ScalarType to,
                           const at::Tensor& cast) {
  Entry entry{
      .source = std::move(as_cast),
      .cast = cast,
      .cast_version = version_of(cast),
      .to = to,
  };
  std::vector<Entry> dropped;
  const std::scoped_lock lock(mutex_);
  if (!wanted_.contains(entry.source.key())) {
    return;
  }
  auto& entries = entries_[entry.source.key()];
  const auto replaced = std::ranges::partition(entries, [&](const Entry& other) {
    return other.source.is_current(source) &&
           (other.to != to || !other.source.is_in_same_context(source));
  });
  dropped.assign(std::move_iterator(replaced.begin()), std::move_iterator(replaced.end()));
  entries.erase(replaced.begin(), replaced.end());
  entries.push_back(std::move(entry));
}

void KeptCastStore::drop() {
  decltype(entries_) dropped;
  const std::scoped_lock lock(mutex_);
  dropped.swap(entries_);
}

void KeptCastStore::drop(const std::vector<const c10::TensorImpl*>& weights) {
  std::vector<Entry> dropped;
  const std::scoped_lock lock(mutex_);
  dropped = take(weights);
}

KeptCasts KeptCastStore::count() {
  Dropped dead;
  KeptCasts kept;
  const std::scoped_lock lock(mutex_);
  dead = take(wanted_.take_dead());
  note_use();
  for (const auto& [weight, entries] : entries_) {
    for (const Entry& entry : entries) {
      ++kept.copies;
      kept.bytes += entry.cast.nbytes();
    }
  }
  return kept;
}

void KeptCastStore::sweep_sometimes() {
  constexpr std::uint32_t kPeriod = 16;
  if ((ended_regions_.fetch_add(1, std::memory_order_relaxed) + 1) % kPeriod == 0) {
    Dropped dead;
    const std::scoped_lock lock(mutex_);
    dead = take(wanted_.take_dead());
    note_use();
  }
}

}  // namespace fastamp::autocast
