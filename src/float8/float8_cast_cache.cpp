// SPDX-License-Identifier: Apache-2.0
#include "float8/float8_cast_cache.h"

#include "autocast/cast_cache.h"
#include "autocast/kept_casts.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"
#include "core/tensor_version.h"

#include <memory>
#include <new>
#include <utility>

namespace fastamp::autocast {

Float8Entry::Float8Entry(const at::Tensor& source, TensorIdentity as_cast, c10::ScalarType to,
                         Float8Cast cast)
    : source_(std::move(as_cast)),
      sizes_(source.sizes().vec()),
      strides_(source.strides().vec()),
      to_(to),
      cast_(std::move(cast)),
      versions_(cast_versions()) {}

std::array<std::uint32_t, 2> Float8Entry::cast_versions() const {
  const auto version = [](const at::Tensor& tensor) {
    return tensor.defined() ? version_of(tensor) : 0;
  };
  return {version(cast_.rows), version(cast_.columns)};
}

bool Float8Entry::is_current(const at::Tensor& source, c10::ScalarType to) const {
  return to_ == to && source_.matches(source) && source.sizes() == at::IntArrayRef(sizes_) &&
         source.strides() == at::IntArrayRef(strides_) && cast_versions() == versions_;
}

std::optional<Float8Cast> Float8Entry::find(const at::Tensor& source, c10::ScalarType to,
                                            Float8Wanted wanted) const {
  const bool has_all =
      (cast_.rows.defined() || !wanted.rows) && (cast_.columns.defined() || !wanted.columns);
  return has_all && is_current(source, to) ? std::optional(cast_) : std::nullopt;
}

std::size_t Float8Entry::bytes() const {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.nbytes() : 0;
  };
  return bytes_of(cast_.rows) + bytes_of(cast_.columns) + bytes_of(cast_.inverse_scale);
}

void Float8Entry::note_use(Float8Wanted layouts) {
  used_.rows |= layouts.rows;
  used_.columns |= layouts.columns;
}

std::optional<PlannedCast> Float8Entry::as_used() const {
  const bool is_used = used_.rows || used_.columns;
  return is_used ? std::optional(PlannedCast{.weight = source_, .to = to_, .wanted = used_})
                 : std::nullopt;
}

std::optional<Float8Cast> Float8Casts::find(const at::Tensor& weight, c10::ScalarType to,
                                            Float8Wanted wanted) const {
  const auto found = entries_.find(weight.unsafeGetTensorImpl());
  return found == entries_.end() ? std::nullopt : found->second.find(weight, to, wanted);
}

std::optional<Float8Cast> Float8Casts::use(const at::Tensor& weight, c10::ScalarType to,
                                           Float8Wanted wanted) {
  auto cast = find(weight, to, wanted);
  if (cast.has_value()) {
    entries_.at(weight.unsafeGetTensorImpl()).note_use(wanted);
  }
  return cast;
}

std::vector<PlannedCast> Float8Casts::used() const {
  std::vector<PlannedCast> casts;
  for (const auto& [weight, entry] : entries_) {
    if (auto used = entry.as_used()) {
      casts.push_back(std::move(*used));
    }
  }
  return casts;
}

std::optional<Float8Entry> Float8Casts::replace(const at::Tensor& weight, Float8Entry entry) {
  const auto found = entries_.find(weight.unsafeGetTensorImpl());
  if (found == entries_.end()) {
    entries_.emplace(weight.unsafeGetTensorImpl(), std::move(entry));
    return std::nullopt;
  }
  return std::exchange(found->second, std::move(entry));
}

std::vector<Float8Entry> Float8Casts::take(const Keys& weights) {
  std::vector<Float8Entry> taken;
  for (const auto* weight : weights) {
    if (auto node = take(weight)) {
      taken.push_back(std::move(node.mapped()));
    }
  }
  return taken;
}

Float8Casts Float8Casts::take_all() { return std::exchange(*this, Float8Casts()); }

std::vector<Float8Entry> Float8Casts::take_dead() {
  Keys dead;
  for (const auto& [weight, entry] : entries_) {
    if (entry.is_of_dead_tensor()) {
      dead.push_back(weight);
    }
  }
  return take(dead);
}

std::size_t Float8Casts::bytes() const {
  std::size_t sum = 0;
  for (const auto& [weight, entry] : entries_) {
    sum += entry.bytes();
  }
  return sum;
}

std::optional<Float8Cast> RegionFloat8Casts::find_weight(const at::Tensor& weight,
                                                         c10::ScalarType to, Float8Wanted wanted) {
  if (seen_changes_ != count_changed_weights()) [[unlikely]] {
    forget_changed();
  }
  return weights_.use(weight, to, wanted);
}

void RegionFloat8Casts::keep_weight(const at::Tensor& weight, Float8Entry entry) {
  if (weights_.empty()) {
    seen_changes_ = count_changed_weights();
  }
  const auto bytes = entry.bytes();
  const auto earlier = weights_.replace(weight, std::move(entry));
  if (sweep_budget_.pays_for(weights_.size(), bytes)) {
    const auto dead = weights_.take_dead();
  }
}

std::optional<Float8Cast> RegionFloat8Casts::find_activation(const at::Tensor& activation,
                                                             c10::ScalarType to,
                                                             Float8Wanted wanted) const {
  return activation_.has_value() ? activation_->find(activation, to, wanted) : std::nullopt;
}

void RegionFloat8Casts::keep_activation(Float8Entry entry) {
  const auto earlier = std::exchange(activation_, std::optional(std::move(entry)));
}

void RegionFloat8Casts::forget_changed() {
  const auto changed = changed_weights_since(seen_changes_);
  seen_changes_ = changed.count;
  if (changed.all) {
    const auto dying = weights_.take_all();
  } else {
    const auto dying = weights_.take({changed.keys.begin(), changed.keys.end()});
  }
}

void RegionFloat8Casts::forget(const Float8Casts::Keys& weights) {
  const auto dying = weights_.take(weights);
}

void RegionFloat8Casts::clear() noexcept {
  if (plans_.is_begun()) {
    try {
      plans_.end(weights_.used());
    } catch (const std::bad_alloc&) {
      plans_.end({});  // Without a plan each weight is cast at its first use.
    }
  }
  if (!empty()) {
    const auto weights = weights_.take_all();
    const auto activation = std::exchange(activation_, std::nullopt);
  }
}

std::shared_ptr<RegionFloat8Casts> make_region_float8_casts() {
  return std::make_shared<RegionFloat8Casts>();
}

bool is_empty(const RegionFloat8Casts& casts) { return casts.empty(); }

void clear_float8_casts(RegionFloat8Casts& casts) noexcept { casts.clear(); }

void forget_float8_casts(RegionFloat8Casts& casts, const Float8Casts::Keys& weights) {
  casts.forget(weights);
}

std::optional<Float8Cast> find_float8_cast(const at::Tensor& weight, c10::ScalarType to,
                                           Float8Wanted wanted) {
  auto* const casts = usable_float8_casts();
  return casts == nullptr ? std::nullopt : casts->find_weight(weight, to, wanted);
}

void keep_float8_cast(const at::Tensor& weight, c10::ScalarType to, const Float8Cast& cast,
                      Float8Wanted used) {
  auto* const casts = is_keepable(weight) ? float8_casts_to_fill() : nullptr;
  if (casts != nullptr) {
    Float8Entry entry(weight, TensorIdentity(weight), to, cast);
    entry.note_use(used);
    casts->keep_weight(weight, std::move(entry));
  }
}

std::optional<Float8Cast> find_float8_activation(const at::Tensor& activation, c10::ScalarType to,
                                                 Float8Wanted wanted) {
  const auto* const casts = usable_float8_casts();
  return casts == nullptr ? std::nullopt : casts->find_activation(activation, to, wanted);
}

void keep_float8_activation(const at::Tensor& activation, c10::ScalarType to,
                            const Float8Cast& cast) {
  auto* const casts = TensorIdentity::exists_for(activation) ? float8_casts_to_fill() : nullptr;
  if (casts != nullptr) {
    casts->keep_activation({activation, TensorIdentity(activation), to, cast});
  }
}

std::vector<WeightToCast> begin_planned_float8_region(const at::Tensor& weight,
                                                      c10::ScalarType to) {
  auto* const casts = is_cached_by_torch(weight) ? nullptr : float8_casts_to_fill();
  return casts == nullptr ? std::vector<WeightToCast>() : casts->begin(weight, to);
}

KeptFloat8Casts& KeptFloat8Casts::instance() {
  // Never destroyed: other threads may run ops while the process exits.
  static auto* kept = new KeptFloat8Casts;
  return *kept;
}

std::optional<Float8Cast> KeptFloat8Casts::find(const at::Tensor& weight, c10::ScalarType to,
                                                Float8Wanted wanted) const {
  const std::scoped_lock lock(mutex_);
  return casts_.find(weight, to, wanted);
}

void KeptFloat8Casts::insert(const at::Tensor& weight, Float8Entry entry) {
  std::optional<Float8Entry> dropped;
  auto& requests = KeptCastStore::instance();
  {
    const std::scoped_lock lock(mutex_);
    // Asked under the lock: a weight whose request ends after this is dropped after it, too.
    if (!requests.is_requested(weight)) {
      return;
    }
    dropped = casts_.replace(weight, std::move(entry));
  }
  requests.sweep_sometimes();
}

std::optional<Float8Entry> KeptFloat8Casts::take_out(const at::Tensor& weight) {
  const std::scoped_lock lock(mutex_);
  auto taken = casts_.take(weight.unsafeGetTensorImpl());
  return taken.empty() ? std::nullopt : std::optional(std::move(taken.mapped()));
}

void KeptFloat8Casts::drop() {
  Float8Casts dropped;
  const std::scoped_lock lock(mutex_);
  dropped = casts_.take_all();
}

void KeptFloat8Casts::drop(const c10::TensorImpl* weight) noexcept {
  Float8Casts::Node dropped;
  const std::scoped_lock lock(mutex_);
  dropped = casts_.take(weight);
}

KeptCasts KeptFloat8Casts::count() const {
  const std::scoped_lock lock(mutex_);
  KeptCasts kept;
  kept.copies += casts_.size();
  kept.bytes += casts_.bytes();
  return kept;
}

void drop_kept_float8_casts() { KeptFloat8Casts::instance().drop(); }

void drop_kept_float8_casts(const c10::TensorImpl* weight) noexcept {
  KeptFloat8Casts::instance().drop(weight);
}

KeptCasts count_kept_float8_casts() { return KeptFloat8Casts::instance().count(); }

}  // namespace fastamp::autocast
