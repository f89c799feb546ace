// SPDX-License-Identifier: Apache-2.0
#include "autocast/kept_casts.h"

#include "autocast/cast_cache.h"
#include "autocast/data_cast.h"
#include "autocast/float8_interface.h"
#include "autocast/tensor_identity.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"

#include <fastamp/autocast/weights_changed.h>

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <optional>
#include <utility>

namespace fastamp {
namespace autocast {
namespace {

void add_keys(at::TensorList weights, std::vector<const c10::TensorImpl*>& keys) {
  for (const at::Tensor& weight : weights) {
    if (weight.defined()) {
      keys.push_back(weight.unsafeGetTensorImpl());
    }
  }
}

}  // namespace

KeptCastStore& KeptCastStore::instance() {
  // Never destroyed: other threads may run ops while the process exits.
  static auto* store = new KeptCastStore;
  return *store;
}

std::uint64_t KeptCastStore::acquire(const std::vector<at::Tensor>& weights) {
  const std::scoped_lock lock(mutex_);
  const auto id = requests_.acquire(weights);
  note_use();
  return id;
}

void KeptCastStore::release(std::uint64_t id) noexcept {
  WeightRequests::Weights released;
  {
    const std::scoped_lock lock(mutex_);
    released = requests_.release(id);
    note_use();
  }
  drop(released);
}

void KeptCastStore::add(std::uint64_t id, const at::Tensor& weight) {
  const std::scoped_lock lock(mutex_);
  requests_.add(id, weight);
  note_use();
}

void KeptCastStore::drop(const c10::TensorImpl* weight) noexcept {
  decltype(entries_)::node_type dropped;  // Destroyed after the lock.
  {
    const std::scoped_lock lock(mutex_);
    dropped = entries_.extract(weight);
  }
  drop_kept_float8_casts(weight);
}

void KeptCastStore::drop(const WeightRequests::Weights& weights) noexcept {
  for (const auto& [weight, reference] : weights) {
    drop(weight);
  }
}

bool KeptCastStore::is_requested(const at::Tensor& weight) const {
  const std::scoped_lock lock(mutex_);
  return requests_.contains(weight.unsafeGetTensorImpl());
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
  // Its maker has the cast itself until it has made an alias.
  const bool is_unused = entry->cast.use_count() == 1 && entry->cast.storage().use_count() == 1;
  taken.is_current = is_unused && is_current(*entry, source);
  auto& entries = entries_[source.unsafeGetTensorImpl()];
  const auto position = entries.begin() + (entry - entries.data());
  dropped.emplace(std::move(*position));
  taken.cast = std::move(dropped->cast);
  entries.erase(position);
  return taken;
}

void KeptCastStore::keep(const at::Tensor& source, TensorIdentity as_cast, c10::ScalarType to,
                         const at::Tensor& cast) {
  Entry entry{
      .source = std::move(as_cast),
      .cast = cast,
      .cast_version = version_of(cast),
      .to = to,
  };
  std::vector<Entry> dropped;
  WeightRequests::Weights dead;
  std::unique_lock lock(mutex_);
  if (!requests_.contains(entry.source.key())) {
    return;
  }
  dead = take_dead_sometimes();
  auto& entries = entries_[entry.source.key()];
  const auto replaced = std::ranges::partition(entries, [&](const Entry& other) {
    return other.source.is_current(source) &&
           (other.to != to || !other.source.is_in_same_context(source));
  });
  dropped.assign(std::move_iterator(replaced.begin()), std::move_iterator(replaced.end()));
  entries.erase(replaced.begin(), replaced.end());
  entries.push_back(std::move(entry));
  lock.unlock();
  drop(dead);
}

void KeptCastStore::drop() {
  drop_kept_float8_casts();
  decltype(entries_) dropped;
  const std::scoped_lock lock(mutex_);
  dropped.swap(entries_);
}

void KeptCastStore::drop(const std::vector<const c10::TensorImpl*>& weights) noexcept {
  for (const auto* weight : weights) {
    drop(weight);
  }
}

KeptCasts KeptCastStore::count() {
  WeightRequests::Weights dead;
  std::unique_lock lock(mutex_);
  dead = requests_.take_dead();
  note_use();
  lock.unlock();
  drop(dead);
  KeptCasts kept = count_kept_float8_casts();
  lock.lock();
  for (const auto& [weight, entries] : entries_) {
    for (const Entry& entry : entries) {
      ++kept.copies;
      kept.bytes += entry.cast.nbytes();
    }
  }
  return kept;
}

WeightRequests::Weights KeptCastStore::take_dead_sometimes() {
  constexpr std::uint32_t kPeriod = 16;
  if (++sweeps_asked_for_ % kPeriod != 0) {
    return {};
  }
  auto dead = requests_.take_dead();
  note_use();
  return dead;
}

void KeptCastStore::sweep_sometimes() noexcept {
  WeightRequests::Weights dead;
  try {
    const std::scoped_lock lock(mutex_);
    dead = take_dead_sometimes();
  } catch (const std::bad_alloc&) {
    return;  // Another time.
  }
  drop(dead);
}

bool is_lasting(const at::Tensor& tensor, bool runs_unchanged) {
  return runs_unchanged && tensor.is_leaf() && !tensor.is_inference() && !tensor.is_view() &&
         TensorIdentity::exists_for(tensor) && tensor.is_non_overlapping_and_dense() &&
         !is_captured(tensor);
}

bool can_be_kept(const at::Tensor& tensor, bool runs_unchanged) {
  return tensor.scalar_type() == c10::kFloat && is_lasting(tensor, runs_unchanged);
}

bool is_kept_weight_slow(const at::Tensor& tensor, bool runs_unchanged) {
  return can_be_kept(tensor, runs_unchanged) && !is_cached_by_torch(tensor) &&
         KeptCastStore::instance().is_requested(tensor);
}

std::vector<const c10::TensorImpl*> keys_of_weights(const torch::optim::Optimizer& optimizer) {
  std::vector<const c10::TensorImpl*> keys;
  for (const auto& group : optimizer.param_groups()) {
    add_keys(group.params(), keys);
  }
  return keys;
}

void forget_casts(const std::vector<const c10::TensorImpl*>& weights) noexcept {
  if (KeptCastStore::instance().is_used()) {
    KeptCastStore::instance().drop(weights);
  }
  log_changed_weights(weights);
}

}  // namespace autocast

KeepCastsGuard::KeepCastsGuard(const std::vector<at::Tensor>& weights)
    : id_(autocast::KeptCastStore::instance().acquire(weights)) {}

KeepCastsGuard::~KeepCastsGuard() { release(); }

void KeepCastsGuard::release() const { autocast::KeptCastStore::instance().release(id_); }

KeptCasts kept_casts() { return autocast::KeptCastStore::instance().count(); }

void drop_kept_casts() {
  autocast::KeptCastStore::instance().drop();
  autocast::clear_thread_cache();
}

void drop_kept_casts(const std::vector<at::Tensor>& weights) {
  std::vector<const c10::TensorImpl*> keys;
  keys.reserve(weights.size());
  for (const at::Tensor& weight : weights) {
    keys.push_back(weight.unsafeGetTensorImpl());
  }
  autocast::KeptCastStore::instance().drop(keys);
  autocast::forget_weight_casts(keys);
}

void weights_changed(at::TensorList weights) {
  std::vector<const c10::TensorImpl*> keys;
  autocast::add_keys(weights, keys);
  autocast::forget_casts(keys);
}

void weights_changed(const torch::optim::Optimizer& optimizer) {
  autocast::forget_casts(autocast::keys_of_weights(optimizer));
}

}  // namespace fastamp
