// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fastamp {

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
