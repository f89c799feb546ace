#include "autocast/kept_cast_store.h"

#include "autocast/alias.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace fastamp::autocast {

KeptCastStore& KeptCastStore::instance() {
  // Never destroyed: other threads may run ops while the process exits.
  static auto* store = new KeptCastStore;
  return *store;
}

std::uint64_t KeptCastStore::acquire(const std::vector<at::Tensor>& weights) {
  std::vector<WeakTensor> references;
  references.reserve(weights.size());
  for (const at::Tensor& weight : weights) {
    if (weight.defined()) {
      references.emplace_back(weight.getIntrusivePtr());
    }
  }
  const std::scoped_lock lock(mutex_);
  for (const WeakTensor& weight : references) {
    ++wanted_[weight._unsafe_get_target()];
  }
  acquired_.emplace(next_id_, std::move(references));
  note_use();
  return next_id_++;
}

void KeptCastStore::release(std::uint64_t id) {
  std::vector<Entry> dropped;
  const std::scoped_lock lock(mutex_);
  const auto acquired = acquired_.find(id);
  if (acquired == acquired_.end()) {
    return;
  }
  for (const WeakTensor& weight : acquired->second) {
    unwant(weight._unsafe_get_target(), dropped);
  }
  acquired_.erase(acquired);
  note_use();
}

void KeptCastStore::unwant(const c10::TensorImpl* weight, std::vector<Entry>& dropped) {
  const auto wanted = wanted_.find(weight);
  if (--wanted->second == 0) {
    wanted_.erase(wanted);
    take(weight, dropped);
  }
}

void KeptCastStore::take(const c10::TensorImpl* weight, std::vector<Entry>& dropped) {
  const auto entries = entries_.find(weight);
  if (entries != entries_.end()) {
    std::ranges::move(entries->second, std::back_inserter(dropped));
    entries_.erase(entries);
  }
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

at::Tensor KeptCastStore::find(const at::Tensor& source, c10::ScalarType to) const {
  const std::scoped_lock lock(mutex_);
  const Entry* entry = find_entry(source, to);
  const bool is_current = entry != nullptr && entry->source.matches(source) &&
                          entry->cast_version == version_of(entry->cast);
  return is_current ? make_alias(entry->cast) : at::Tensor();
}

at::Tensor KeptCastStore::find_memory(const at::Tensor& source, c10::ScalarType to) const {
  const std::scoped_lock lock(mutex_);
  const Entry* entry = find_entry(source, to);
  return entry == nullptr ? at::Tensor() : make_alias(entry->cast);
}

void KeptCastStore::insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  Entry entry{
      .source = TensorIdentity(source),
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
  for (const auto* weight : weights) {
    take(weight, dropped);
  }
}

KeptCasts KeptCastStore::count() {
  std::vector<Entry> dead;
  KeptCasts kept;
  const std::scoped_lock lock(mutex_);
  dead = take_dead();
  for (const auto& [weight, entries] : entries_) {
    for (const Entry& entry : entries) {
      ++kept.copies;
      kept.bytes += entry.cast.nbytes();
    }
  }
  return kept;
}

std::vector<KeptCastStore::Entry> KeptCastStore::take_dead() {
  std::vector<Entry> dropped;
  for (auto& [id, weights] : acquired_) {
    std::erase_if(weights, [&](const WeakTensor& weight) {
      const bool is_dead = weight.expired();
      if (is_dead) {
        unwant(weight._unsafe_get_target(), dropped);
      }
      return is_dead;
    });
  }
  note_use();
  return dropped;
}

void KeptCastStore::sweep_sometimes() {
  constexpr std::uint32_t kPeriod = 16;
  if ((ended_regions_.fetch_add(1, std::memory_order_relaxed) + 1) % kPeriod == 0) {
    std::vector<Entry> dead;
    const std::scoped_lock lock(mutex_);
    dead = take_dead();
  }
}

}  // namespace fastamp::autocast
