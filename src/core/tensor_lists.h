// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COWDeleter.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// What walks over lists of thousands of tensors need. Each tensor is three to four cache lines in
// memory, and waiting for them is most of what such a walk costs.
namespace fastamp {

namespace detail {

/// Whether a storage makes its memory, or a copy of it, when it is first written.
template <typename Storage>
bool materialises(const Storage& storage, const at::DataPtr& data) {
  if constexpr (requires { storage.has_materializer(); }) {  // LibTorch 2.15.
    if (storage.has_materializer()) {
      return true;
    }
  }
  return data.get_deleter() == &c10::impl::cow::cow_deleter;
}

}  // namespace detail

/// The address of a tensor's first element, if it can be had without a check and without side
/// effects; else null: there is no memory (yet), or it has to be copied before it is written. Then
/// the tensor's own accessors return, or do, what is needed.
inline void* address_of(const c10::TensorImpl& tensor) {
  auto* const storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) [[unlikely]] {
    return nullptr;
  }
  // The checks ask for copy-on-write, which is asked here, and for what makes access to fake and
  // functional tensors throw. They are in another cache line.
  const auto& data = storage->_mutable_data_ptr_no_checks();
  if (data.get() == nullptr || detail::materialises(*storage, data)) [[unlikely]] {
    return nullptr;
  }
  const auto offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
  return static_cast<char*>(data.get()) + offset;
}

/// Asks for a tensor's cache lines; its storage is another one.
inline void prefetch_tensor(const c10::TensorImpl* tensor) {
  __builtin_prefetch(tensor, /*rw=*/1);  // Its count of references and storage,
  const auto* const bytes = reinterpret_cast<const char*>(tensor);
  __builtin_prefetch(bytes + 64);                           // its offset and size,
  __builtin_prefetch(bytes + sizeof(c10::TensorImpl) - 1);  // its dtype, device and keys.
}

/// Asks for a storage's cache line. The tensor's own have to be there.
inline void prefetch_storage(const c10::TensorImpl* tensor) {
  __builtin_prefetch(tensor->unsafe_storage().unsafeGetStorageImpl());
}

/// A set of pointers, made for a few thousand: an insertion takes 2 ns, where std::unordered_set
/// takes 30.
class PointerSet {
 public:
  /// False if it was there already.
  bool insert(const void* pointer) {
    if (2 * (count_ + 1) > slots_.size()) {
      grow();
    }
    const bool added = place(pointer);
    count_ += added ? 1 : 0;
    return added;
  }

 private:
  static std::size_t hash(const void* pointer) {
    constexpr std::uint64_t kGoldenRatio = 0x9E3779B97F4A7C15U;
    return static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(pointer) * kGoldenRatio) >>
                                    32U);
  }

  bool place(const void* pointer) {
    const auto mask = slots_.size() - 1;
    for (auto i = hash(pointer) & mask;; i = (i + 1) & mask) {
      if (slots_[i] == pointer) {
        return false;
      }
      if (slots_[i] == nullptr) {
        slots_[i] = pointer;
        return true;
      }
    }
  }

  void grow() {
    constexpr std::size_t kFirst = 256;
    const auto old = std::exchange(
        slots_, std::vector<const void*>(slots_.empty() ? kFirst : 4 * slots_.size()));
    for (const void* pointer : old) {
      if (pointer != nullptr) {
        place(pointer);
      }
    }
  }

  std::vector<const void*> slots_;  // Their number is a power of two; at most half are taken.
  std::size_t count_ = 0;
};

/// Finds tensors that occur twice while a list is built that holds a reference to each.
///
/// A tensor that occurs again has one reference more than the first time: the list's. So as long as
/// all tensors have the same number of references, none has occurred twice, and comparing it is the
/// whole check, at less than a nanosecond. Python's reference is left out: not all tensors have it.
/// Once a number differs, the tensors of the list and all that follow are looked up. References
/// that another thread adds or drops meanwhile can hide a repetition, so safety must not depend on
/// the answer.
class RepeatFinder {
 public:
  /// Whether a tensor that is about to be added is in the list.
  /// @param held      The tensor that the list will hold a reference to.
  /// @param identity  Is equal for repetitions: held itself, or the object that it belongs to.
  /// @param fill      Called as fill(PointerSet&) at most once: inserts the identities of the list.
  template <typename Fill>
  bool comes_again(const at::Tensor& held, const void* identity, const Fill& fill) {
    const auto references = references_to(held);
    if (!looks_up_) [[likely]] {
      if (references == references_) [[likely]] {
        return false;
      }
      if (references_ == kNone) {
        references_ = references;
        return false;
      }
      look_up(fill);
    }
    return !known_.insert(identity);
  }

  /// Looks everything up from now on: for lists of tensors of their own, such as copies, whose
  /// reference counts do not show a repetition.
  template <typename Fill>
  void look_up(const Fill& fill) {
    if (!std::exchange(looks_up_, true)) {
      fill(known_);
    }
  }

 private:
  static constexpr std::int64_t kNone = -1;

  template <typename Slot>
  static bool has_object(const Slot& slot) {
    if constexpr (requires { slot.load_pyobj(); }) {  // From LibTorch 2.11 on.
      return slot.load_pyobj() != nullptr;
    } else {
      return slot._unchecked_untagged_pyobj() != nullptr;
    }
  }

  static std::int64_t references_to(const at::Tensor& tensor) {
    const auto count = static_cast<std::int64_t>(tensor.use_count());
    return count - (has_object(*tensor.unsafeGetTensorImpl()->pyobj_slot()) ? 1 : 0);
  }

  std::int64_t references_ = kNone;
  bool looks_up_ = false;
  PointerSet known_;
};

}  // namespace fastamp
