#include "autocast/activation_ring.h"

#include "autocast/tensor_identity.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace fastamp::autocast {
namespace {

/// A tensor of its own over memory that already holds the cast of `source`.
at::Tensor make_alias(c10::Storage memory, const at::Tensor& source, c10::ScalarType to,
                      const c10::VariableVersion& version) {
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(memory),
      c10::DispatchKeySet(c10::computeDispatchKey(to, c10::kStrided, source.device())),
      c10::scalarTypeToTypeMeta(to));
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  // Shared, so that editing one use in place is noticed by the backward of the others.
  impl->set_version_counter(version);
  return alias;
}

}  // namespace

at::Tensor ActivationRing::find(const at::Tensor& source, c10::ScalarType to) {
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

void ActivationRing::insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
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

void ActivationRing::clear() noexcept {
  // The first slot is filled first, and again after each clear.
  if (slots_[0].has_value()) {
    slots_.fill(std::nullopt);
    next_ = 0;
  }
}

}  // namespace fastamp::autocast
