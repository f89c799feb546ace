// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a step needs on each device: the lists that SGD and Adam have in common, parameters sorted
// by device, group by group, and the AmpStep.

#include "core/dtypes.h"
#include "core/repeat_finder.h"

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace fastamp::optim {

/// Borrowed tensors, as the TensorList that an op takes. Borrowing saves two atomic operations per
/// tensor, which for small parameters is most of the cost of collecting. The lenders must live
/// until this is destroyed.
class BorrowedTensors {
 public:
  BorrowedTensors() = default;
  BorrowedTensors(const BorrowedTensors&) = delete;
  BorrowedTensors& operator=(const BorrowedTensors&) = delete;
  ~BorrowedTensors() {
    for (auto& tensor : tensors_) {
      Traits::destroyBorrow(tensor);
    }
  }

  void push_back(const at::Tensor& tensor) {
    if (tensors_.size() == tensors_.capacity()) [[unlikely]] {
      // First, so that nothing is borrowed if it throws: that would be released as if owned.
      tensors_.reserve(std::max<std::size_t>(8, 2 * tensors_.size()));
    }
    tensors_.push_back(Traits::createBorrow(tensor));
  }
  void reserve(std::size_t count) { tensors_.reserve(count); }
  bool empty() const { return tensors_.empty(); }
  at::TensorList list() const { return tensors_; }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  std::vector<at::Tensor> tensors_;
};

/// The lists that every step has for the parameters on one device.
struct FASTAMP_API DeviceLists {
  explicit DeviceLists(c10::Device on) : device(on) {}

  void reserve(std::size_t count);
  void open_group(std::size_t index, double rate, const at::Tensor& rate_tensor);
  /// False if the parameter was added before: it is stepped once.
  bool add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& master) {
    if (finder.comes_again(grad, param.unsafeGetTensorImpl(),
                           [this](PointerSet& known) { insert_params(known); })) [[unlikely]] {
      return false;
    }
    ++group_sizes.back();
    params.push_back(param);
    grads.push_back(grad);
    if (is_16_bit(param)) {
      masters.push_back(master);
    }
    return true;
  }
  /// Looks every parameter up from now on: for gradients that are copies of the parameters'.
  void look_up_repeats() {
    finder.look_up([this](PointerSet& known) { insert_params(known); });
  }
  /// The noise of the parameter added last; negative for none.
  void add_noise(std::int64_t origin) {
    if (origin >= 0 || !noise_origins.empty()) [[unlikely]] {
      noise_origins.resize(grads.size() - 1, -1);
      noise_origins.push_back(origin);
    }
  }
  /// A 16-bit copy of the parameter added last, float32, that the step is to write.
  void add_copy(at::Tensor weight_copy) {
    copy_of.push_back(static_cast<std::int64_t>(params.list().size()) - 1);
    weight_copies.push_back(std::move(weight_copy));
  }
  /// Learning rates as the op takes them: none, or a tensor for every group.
  std::vector<at::Tensor> learning_rates() const;

  c10::Device device;
  BorrowedTensors params;
  std::vector<at::Tensor> grads;  ///< Owned: another thread may reset `.grad` meanwhile.
  BorrowedTensors masters;
  std::vector<at::Tensor> weight_copies;
  std::vector<std::int64_t> copy_of;
  std::vector<std::int64_t> noise_origins;  ///< None while no parameter has one.
  std::vector<std::int64_t> group_sizes;
  std::vector<double> lr;
  std::vector<at::Tensor> lr_tensors;  ///< Per group; undefined where lr counts.
  bool any_lr_tensor = false;
  std::size_t open = 0;  ///< The group that is open.
  RepeatFinder finder;

 private:
  void insert_params(PointerSet& known) const;
};

/// The lists of all devices met. `Lists` derives from DeviceLists and has open(group).
template <typename Lists, typename Group>
class ListsByDevice {
 public:
  /// Parameters that follow belong to this group.
  void begin_group(const Group& group, std::size_t expected) {
    group_ = group;
    ++groups_;
    expected_ += expected;
    current_ = nullptr;
  }

  Lists& for_device(c10::Device device) {
    if (current_ == nullptr || current_->device != device) [[unlikely]] {
      select(device);
    }
    return *current_;
  }
  const Group& group() const { return group_; }

  /// Calls op(lists) for each device, and before the first of them check(lists) for all, so that
  /// either every device steps or none. One device's op checks all of its lists itself.
  template <typename Check, typename Op>
  void run(const Check& check, const Op& op) const {
    if (lists_.size() > 1) {
      for (const auto& lists : lists_) {
        check(lists);
      }
    }
    for (const auto& lists : lists_) {
      op(lists);
    }
  }

 private:
  void select(c10::Device device) {
    current_ = nullptr;
    for (auto& lists : lists_) {
      if (lists.device == device) {
        current_ = &lists;
      }
    }
    if (current_ == nullptr) {
      current_ = &lists_.emplace_back(device);
    }
    if (current_->open != groups_) {
      current_->reserve(expected_);
      current_->open_group(groups_, group_.lr, group_.lr_tensor);
      current_->add_group(group_);
    }
  }

  Group group_{};
  std::size_t groups_ = 0;
  std::size_t expected_ = 0;
  std::deque<Lists> lists_;  // Not a vector: current_ points into it.
  Lists* current_ = nullptr;
};

/// Returns what a step is asked for, with tensors on `device`. Copies between devices do not wait,
/// except to the CPU.
FASTAMP_API AmpStep amp_step_on(const AmpStep& amp_step, c10::Device device);

/// Whether the host knows, without waiting, that the step is not skipped.
bool steps_on_host(const AmpStep& amp_step);

}  // namespace fastamp::optim
