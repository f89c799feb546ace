// SPDX-License-Identifier: Apache-2.0
#include "autocast/recent_casts.h"

#include "autocast/data_cast.h"
#include "autocast/tensor_identity.h"

#include <c10/core/Storage.h>

#include <utility>

namespace fastamp::autocast {

at::Tensor RecentCasts::find(const at::Tensor& source, c10::ScalarType to) {
  for (const auto& slot : slots_) {
    if (!slot.has_value() || slot->source.key() != source.unsafeGetTensorImpl() || slot->to != to) {
      continue;
    }
    auto memory = slot->memory.lock();
    const bool is_whole = memory && memory->nbytes() == static_cast<std::size_t>(source.numel()) *
                                                            c10::elementSize(to);
    if (is_whole && slot->source.matches(source) &&
        slot->cast_version.current_version() == slot->cast_version_then) {
      return make_alias(c10::Storage(std::move(memory)), source, to, slot->cast_version);
    }
    return {};
  }
  return {};
}

void RecentCasts::keep(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  std::optional<Slot>* free = nullptr;
  for (auto& slot : slots_) {
    if (slot.has_value() && slot->source.key() == source.unsafeGetTensorImpl() && slot->to == to) {
      free = &slot;
    }
  }
  if (free == nullptr) {
    free = &slots_[next_];
    next_ = (next_ + 1) % kSlots;
  }
  free->emplace(Slot{
      .source = TensorIdentity(source),
      .memory = cast.storage().getWeakStorageImpl(),
      .cast_version = cast.unsafeGetTensorImpl()->version_counter(),
      .cast_version_then = version_of(cast),
      .to = to,
  });
}

void RecentCasts::clear() noexcept {
  // The first slot is filled first, and again after each clear.
  if (slots_[0].has_value()) {
    slots_.fill(std::nullopt);
    next_ = 0;
  }
}

}  // namespace fastamp::autocast
