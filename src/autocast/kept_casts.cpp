// SPDX-License-Identifier: Apache-2.0
#include "autocast/kept_casts.h"

#include "autocast/data_cast.h"
#include "autocast/tensor_identity.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"
#include "float8/float8_copy.h"

#include <fastamp/autocast/weights_changed.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/optimizer.h>

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

void KeptCastStore::keep(const at::Tensor& source, TensorIdentity as_cast, c10::ScalarType to,
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

/// Whether a cast of this tensor, whatever its dtype is, can outlive regions.
bool is_lasting(const at::Tensor& tensor, bool runs_unchanged) {
  return runs_unchanged && tensor.is_leaf() && !tensor.is_inference() && !tensor.is_view() &&
         TensorIdentity::exists_for(tensor) && tensor.is_non_overlapping_and_dense() &&
         !is_captured(tensor);
}

}  // namespace

bool can_be_kept(const at::Tensor& tensor, bool runs_unchanged) {
  return tensor.scalar_type() == c10::kFloat && is_lasting(tensor, runs_unchanged);
}

bool is_kept_for_float8_slow(const at::Tensor& tensor) {
  return is_lasting(tensor, runs_unchanged(tensor, call_path(tensor))) &&
         is_weight_cache_enabled() && KeptCastStore::instance().is_requested(tensor);
}

bool is_kept_weight_slow(const at::Tensor& tensor, bool runs_unchanged) {
  return can_be_kept(tensor, runs_unchanged) && !is_cached_by_torch(tensor) &&
         KeptCastStore::instance().is_requested(tensor);
}

WeightCopies::WeightCopies() : id_(KeptCastStore::instance().acquire({})) {}

WeightCopies::~WeightCopies() { end(); }

void WeightCopies::end() {
  if (!std::exchange(ended_, true)) {
    KeptCastStore::instance().release(id_);
  }
}

at::Tensor CopyingStep::open(const at::Tensor& weight, c10::ScalarType to) {
  if (copies_ == nullptr || copies_->ended_) {
    return {};
  }
  if (is_captured(weight)) {
    // Replays will change the weights and move no version: their casts must not be kept any more.
    copies_->end();
    opened_.clear();
    return {};
  }
  const CallPath path = call_path(weight);
  const bool is_float8 = to == c10::kFloat8_e4m3fn;
  if (!can_be_kept(weight, runs_unchanged(weight, path)) ||
      (is_float8 && path == CallPath::intercepted)) {
    return {};
  }
  KeptCastStore::instance().add(copies_->id_, weight);
  if (!is_float8) {
    return open_16_bit(weight, to, path);
  }
  if (at::Tensor copy = open_float8(weight); copy.defined()) {
    return copy;
  }
  at::Tensor copy = open_16_bit(weight, c10::kBFloat16, path);
  return copy.defined() ? copy : open_16_bit(weight, c10::kHalf, path);
}

at::Tensor CopyingStep::open_16_bit(const at::Tensor& weight, c10::ScalarType to, CallPath path) {
  const auto weight_version = version_of(weight);
  auto taken = KeptCastStore::instance().take_out(weight, to);
  if (!taken.cast.defined()) {
    return {};  // Embeddings, normalisations: no region has requested a cast.
  }
  if (!taken.is_current) {
    // Out of date, or saved by a graph that may still run backward with the old values.
    std::optional<c10::InferenceMode> normal_mode;  // Its tensors are of no use outside of it.
    if (c10::InferenceMode::is_enabled()) {
      normal_mode.emplace(false);
    }
    taken.cast = cast_without_history(weight, to, path);
    if (was_wrapped(taken.cast, weight)) {
      return {};
    }
  }
  opened_.push_back({&weight, taken.cast, {}, to, weight_version, version_of(taken.cast)});
  return std::move(taken.cast);
}

at::Tensor CopyingStep::open_float8(const at::Tensor& weight) {
  if (!can_have_float8_copy(weight)) {
    return {};
  }
  const auto weight_version = version_of(weight);
  auto taken = KeptCastStore::instance().take_out_float8(weight);
  if (!taken.has_value() || taken->to() != c10::kFloat8_e4m3fn) {
    return {};
  }
  const bool is_current = taken->is_current(weight, c10::kFloat8_e4m3fn);
  Float8Cast cast = std::move(*taken).cast();
  if (!is_current || !is_float8_copy(cast) || !is_unshared_float8_copy(cast)) {
    const bool columns = cast.columns.defined();
    cast = {};  // Its memory may serve the new one.
    const c10::InferenceMode normal_mode(false);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    cast = make_float8_copy(weight, columns);
  }
  const at::Tensor rows = cast.rows;
  opened_.push_back(
      {&weight, rows, std::move(cast), c10::kFloat8_e4m3fn, weight_version, version_of(rows)});
  return rows;
}

void CopyingStep::finish() {
  std::vector<Opened> float8;
  for (Opened& opened : std::exchange(opened_, {})) {
    // After a write other than the step's own, the weight copy may hold another value.
    if (version_of(*opened.weight) != opened.weight_version + 1 ||
        version_of(opened.cast) != opened.cast_version + 1) {
      continue;
    }
    if (opened.float8.rows.defined()) {
      float8.push_back(std::move(opened));
    } else {
      KeptCastStore::instance().keep(*opened.weight, TensorIdentity(*opened.weight), opened.to,
                                     opened.cast);
    }
  }
  finish_float8(float8);
}

void CopyingStep::finish_float8(const std::vector<Opened>& written) {
  std::vector<SteppedFloat8Copy> copies;
  copies.reserve(written.size());
  for (const Opened& opened : written) {
    copies.push_back({opened.weight, opened.float8});
  }
  refresh_float8_copies(copies);
  for (const Opened& opened : written) {
    const at::Tensor& weight = *opened.weight;
    KeptCastStore::instance().insert_float8(
        weight, {weight, TensorIdentity(weight), opened.to, opened.float8});
  }
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

namespace {

using Keys = std::vector<const c10::TensorImpl*>;

void add_keys(at::TensorList weights, Keys& keys) {
  for (const at::Tensor& weight : weights) {
    if (weight.defined()) {
      keys.push_back(weight.unsafeGetTensorImpl());
    }
  }
}

void forget_casts(const Keys& keys) {
  if (autocast::KeptCastStore::instance().is_used()) {
    autocast::KeptCastStore::instance().drop(keys);
  }
  autocast::log_changed_weights(keys);
}

}  // namespace

void weights_changed(at::TensorList weights) {
  Keys keys;
  add_keys(weights, keys);
  forget_casts(keys);
}

void weights_changed(const torch::optim::Optimizer& optimizer) {
  Keys keys;
  for (const auto& group : optimizer.param_groups()) {
    add_keys(group.params(), keys);
  }
  forget_casts(keys);
}

}  // namespace fastamp
