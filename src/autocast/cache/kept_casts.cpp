// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/kept_casts.h"

#include "autocast/cache/thread_cache.h"
#include "autocast/make/data_cast.h"
#include "autocast/make/tensor_identity.h"
#include "autocast/torch/torch_state.h"
#include "autocast/trace/tracing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace fastamp {
namespace autocast {

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

void KeptCastStore::release(std::uint64_t id) {
  Dropped dropped;
  const std::scoped_lock lock(mutex_);
  dropped = take(requests_.release(id));
  note_use();
}

void KeptCastStore::add(std::uint64_t id, const at::Tensor& weight) {
  const std::scoped_lock lock(mutex_);
  requests_.add(id, weight);
  note_use();
}

KeptCastStore::Dropped KeptCastStore::take(WeightRequests::Forgotten weights) {
  auto entries = take(weights.unrequested);
  auto float8 = float8_.take(weights.unrequested);
  return {std::move(weights), std::move(entries), std::move(float8)};
}

std::vector<KeptCastStore::Entry> KeptCastStore::take(const WeightRequests::Keys& weights) {
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
  Dropped dead;
  const std::scoped_lock lock(mutex_);
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
}

std::optional<Float8Cast> KeptCastStore::find_float8(const at::Tensor& source, c10::ScalarType to,
                                                     Float8Wanted wanted) const {
  const std::scoped_lock lock(mutex_);
  return float8_.find(source, to, wanted);
}

void KeptCastStore::insert_float8(const at::Tensor& source, Float8Entry entry) {
  std::optional<Float8Entry> dropped;
  Dropped dead;
  const std::scoped_lock lock(mutex_);
  if (requests_.contains(source.unsafeGetTensorImpl())) {
    dead = take_dead_sometimes();
    dropped = float8_.replace(source, std::move(entry));
  }
}

std::optional<Float8Entry> KeptCastStore::take_out_float8(const at::Tensor& source) {
  const std::scoped_lock lock(mutex_);
  auto taken = float8_.take({source.unsafeGetTensorImpl()});
  return taken.empty() ? std::nullopt : std::optional(std::move(taken.front()));
}

void KeptCastStore::drop() {
  decltype(entries_) dropped;
  Float8Casts dropped_float8;
  const std::scoped_lock lock(mutex_);
  dropped.swap(entries_);
  dropped_float8 = float8_.take_all();
}

void KeptCastStore::drop(const std::vector<const c10::TensorImpl*>& weights) {
  std::vector<Entry> dropped;
  std::vector<Float8Entry> dropped_float8;
  const std::scoped_lock lock(mutex_);
  dropped = take(weights);
  dropped_float8 = float8_.take(weights);
}

KeptCasts KeptCastStore::count() {
  Dropped dead;
  KeptCasts kept;
  const std::scoped_lock lock(mutex_);
  dead = take(requests_.take_dead());
  note_use();
  for (const auto& [weight, entries] : entries_) {
    for (const Entry& entry : entries) {
      ++kept.copies;
      kept.bytes += entry.cast.nbytes();
    }
  }
  kept.copies += float8_.size();
  kept.bytes += float8_.bytes();
  return kept;
}

KeptCastStore::Dropped KeptCastStore::take_dead_sometimes() {
  constexpr std::uint32_t kPeriod = 16;
  if (++sweeps_asked_for_ % kPeriod != 0) {
    return {};
  }
  Dropped dead = take(requests_.take_dead());
  note_use();
  return dead;
}

void KeptCastStore::sweep_sometimes() {
  Dropped dead;
  const std::scoped_lock lock(mutex_);
  dead = take_dead_sometimes();
}

namespace {

at::Tensor cast_without_history(const at::Tensor& weight, c10::ScalarType to, CallPath path) {
  if (path == CallPath::direct) {
    return cast_data(weight, to);
  }
  const at::NoGradGuard no_grad;
  return at::_ops::to_dtype::call(weight, to, /*non_blocking=*/false, /*copy=*/false, std::nullopt);
}

at::Tensor find_or_make(const at::Tensor& weight, c10::ScalarType to, CallPath path) {
  auto& store = KeptCastStore::instance();
  at::Tensor kept = store.find(weight, to);
  if (kept.defined()) {
    note_cast(CastEvent::kept_hit, kept);
    return kept;
  }
  TensorIdentity as_cast(weight);
  const at::Tensor made = cast_without_history(weight, to, path);
  note_cast(CastEvent::weight_cast, made);
  if (was_wrapped(made, weight)) {
    return {};  // A mode has made another kind of tensor of it.
  }
  store.insert(weight, std::move(as_cast), to, made);
  return make_alias(made);
}

}  // namespace

namespace {

/// Whether a cast of this tensor, whatever its dtype is, can outlive regions.
bool is_lasting(const at::Tensor& tensor, CallPath path) {
  return tensor.is_leaf() && (path != CallPath::intercepted || is_seen_by_modes_alone(tensor)) &&
         !tensor.is_inference() && !tensor.is_view() && TensorIdentity::exists_for(tensor) &&
         tensor.is_non_overlapping_and_dense() && !is_captured(tensor);
}

}  // namespace

bool can_be_kept(const at::Tensor& tensor, CallPath path) {
  return tensor.scalar_type() == c10::kFloat && is_lasting(tensor, path);
}

bool is_kept_for_float8_slow(const at::Tensor& tensor) {
  return is_lasting(tensor, call_path(tensor)) && is_weight_cache_enabled() &&
         KeptCastStore::instance().is_requested(tensor);
}

bool is_kept_weight_slow(const at::Tensor& tensor, CallPath path) {
  return can_be_kept(tensor, path) && is_weight_cache_enabled() && !is_cached_by_torch(tensor) &&
         KeptCastStore::instance().is_requested(tensor);
}

at::Tensor make_kept_cast(const at::Tensor& weight, c10::ScalarType to, CallPath path) {
  if (c10::InferenceMode::is_enabled()) {
    // As in cast_weight: an inference tensor would be of no use outside the mode.
    const c10::InferenceMode normal_mode(false);
    return cast_without_history(weight, to, path);
  }
  return cast_without_history(weight, to, path);
}

at::Tensor find_or_make_kept_cast(const at::Tensor& weight, c10::ScalarType to, CallPath path) {
  if (c10::InferenceMode::is_enabled()) {
    const c10::InferenceMode normal_mode(false);  // For aliases, too.
    return find_or_make(weight, to, path);
  }
  return find_or_make(weight, to, path);
}

}  // namespace autocast

KeepCasts::KeepCasts(const std::vector<at::Tensor>& weights)
    : id_(autocast::KeptCastStore::instance().acquire(weights)) {}

KeepCasts::~KeepCasts() { release(); }

void KeepCasts::release() const { autocast::KeptCastStore::instance().release(id_); }

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

}  // namespace fastamp
