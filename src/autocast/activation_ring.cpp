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
  for (Slot& slot : slots_) {
    if (slot.key != source.unsafeGetTensorImpl() || slot.to != to) {
      continue;
    }
    if (slot.source_version != version_of(source) || slot.data != data_of(source) ||
        slot.cast_version.current_version() != slot.cast_version_then ||
        slot.context != execution_context(source.device())) {
      return {};
    }
    auto memory = slot.memory->lock();
    return memory ? make_alias(c10::Storage(std::move(memory)), source, to, slot.cast_version)
                  : at::Tensor();
  }
  return {};
}

void ActivationRing::insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  auto* key = source.unsafeGetTensorImpl();
  auto* slot = &slots_[next_];
  for (Slot& other : slots_) {
    if (other.key == key && other.to == to) {
      slot = &other;
    }
  }
  if (slot == &slots_[next_]) {
    next_ = (next_ + 1) % kSlots;
  }
  slot->key = key;
  slot->source.emplace(source.getIntrusivePtr());
  slot->memory.emplace(cast.storage().getWeakStorageImpl());
  slot->cast_version = cast.unsafeGetTensorImpl()->version_counter();
  slot->data = data_of(source);
  slot->context = execution_context(source.device());
  slot->source_version = version_of(source);
  slot->cast_version_then = version_of(cast);
  slot->to = to;
}

void ActivationRing::clear() noexcept {
  // The first slot is filled first, and again after each clear.
  if (slots_[0].key != nullptr) {
    slots_.fill({});
    next_ = 0;
  }
}

}  // namespace fastamp::autocast
