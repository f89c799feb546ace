// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/float8_casts.h"

#include "autocast/cache/changed_weights.h"

#include <utility>

namespace fastamp::autocast {

std::optional<Float8Cast> Float8Casts::find(const at::Tensor& weight, c10::ScalarType to,
                                            Float8Wanted wanted) {
  if (seen_changes_ != count_changed_weights()) [[unlikely]] {
    forget_changed();
  }
  const auto found = entries_.find(weight.unsafeGetTensorImpl());
  if (found == entries_.end()) {
    return std::nullopt;
  }
  const Entry& entry = found->second;
  const bool is_current = entry.to == to && entry.source.matches(weight) &&
                          weight.strides() == at::IntArrayRef(entry.strides);
  const bool has_all = (entry.cast.rows.defined() || !wanted.rows) &&
                       (entry.cast.columns.defined() || !wanted.columns);
  return is_current && has_all ? std::optional(entry.cast) : std::nullopt;
}

void Float8Casts::insert(const at::Tensor& weight, c10::ScalarType to, const Float8Cast& cast) {
  if (entries_.empty()) {
    seen_changes_ = count_changed_weights();
  }
  Entry entry{TensorIdentity(weight), weight.strides().vec(), to, cast};
  const auto [place, is_new] = entries_.try_emplace(weight.unsafeGetTensorImpl(), entry);
  if (!is_new) {
    std::swap(place->second, entry);
  }
}

void Float8Casts::forget_changed() {
  const auto changed = changed_weights_since(seen_changes_);
  seen_changes_ = changed.count;
  std::erase_if(entries_, [&](const auto& entry) {
    return changed.all || changed.keys.contains(entry.first);
  });
}

void Float8Casts::forget(const std::vector<const c10::TensorImpl*>& weights) {
  for (const auto* weight : weights) {
    entries_.erase(weight);
  }
}

void Float8Casts::clear() noexcept {
  if (!entries_.empty()) {
    const auto dying = std::exchange(entries_, {});
  }
}

}  // namespace fastamp::autocast
