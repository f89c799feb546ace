// SPDX-License-Identifier: Apache-2.0
#pragma once

// Steps of SGD and Adam: the front ends (adam_family.h and sgd_family.h here, Python's in
// python/csrc/python_step.cpp) walk over parameters and add each to the lists of its device, group
// by group; run() calls one fused op per device with them.

#include "core/dtypes.h"
#include "core/tensor_lists.h"
#include "kernels/functors/narrow_moments.h"

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step.h>

#include <ATen/core/List.h>
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

/// Returns the learning rate of a group as the ops take it: float or double, on the CPU or on the
/// device of its parameters.
/// @param given  A tensor, or undefined: the rate is `otherwise`.
at::Tensor rate_tensor(const at::Tensor& given, double otherwise, c10::Device device);

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

/// Collects the parameters of one step into the lists of their devices, then runs one fused op per
/// device. begin_group() for each group, add() for each of its parameters that has a gradient,
/// run(). Parameters and state are borrowed: they must live, unmoved, until this is destroyed. Not
/// thread-safe.
/// @tparam Lists  Derives from DeviceLists and has add_group(group).
template <typename Lists, typename Group>
class ListedStep {
 public:
  /// Says that the parameters that follow belong to this group.
  /// @param expected  How many will follow; a hint.
  void begin_group(const Group& group, std::size_t expected) {
    group_ = group;
    ++groups_;
    expected_ += expected;
    current_ = nullptr;
  }

  /// Looks up a parameter that may be listed again, which a gradient that is a copy of the
  /// parameter's does not show by itself. Call it before that is added.
  void look_up_repeats(const at::Tensor& param) { for_device(param.device()).look_up_repeats(); }

  /// Adds a 16-bit copy of the parameter added last, float32, that the step is to write.
  void add_copy(const at::Tensor& param, at::Tensor weight_copy) {
    for_device(param.device()).add_copy(std::move(weight_copy));
  }

 protected:
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
  void call_for_each(const Check& check, const Op& op) const {
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

/// Hyperparameters of a parameter group.
struct SgdGroup {
  double lr = 0.0;
  at::Tensor lr_tensor;  ///< Replaces lr where it is defined.
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
};

/// Whether narrow buffers with such a momentum are rounded by noise.
inline bool needs_noise(double momentum) {
  return kernels::first_moments_need_noise(static_cast<float>(1.0 - momentum));
}

/// The lists of SGD on one device.
struct FASTAMP_API SgdLists : DeviceLists {
  using DeviceLists::DeviceLists;
  void add_group(const SgdGroup& group);

  BorrowedTensors momentum_buffers;
  BorrowedTensors momentum_steps;
  std::vector<double> momentum;
  std::vector<double> dampening;
  std::vector<double> weight_decay;
  c10::List<bool> nesterov;
  c10::List<bool> maximize;
};

/// One step of SGD.
class FASTAMP_API SgdStep : public ListedStep<SgdLists, SgdGroup> {
 public:
  /// Dtypes and shapes are those of ops::fused_sgd_. Tensors that a parameter does not use are
  /// ignored and may be undefined: the momentum tensors without momentum, the master of an fp32
  /// parameter.
  /// @param noise_origin  As in ops::fused_sgd_; ignored where the momentum needs no noise.
  /// @returns False if the parameter was added before: it is stepped once, at its first position.
  bool add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& momentum_buffer,
           const at::Tensor& momentum_step, const at::Tensor& master,
           std::int64_t noise_origin = -1) {
    auto& lists = for_device(param.device());
    if (!lists.add(param, grad, master)) [[unlikely]] {
      return false;
    }
    if (lists.momentum.back() != 0.0) {
      lists.momentum_buffers.push_back(momentum_buffer);
      lists.momentum_steps.push_back(momentum_step);
    }
    lists.add_noise(needs_noise(group().momentum) ? noise_origin : -1);
    return true;
  }

  /// Steps all parameters, or none: every device's lists are checked before the first op.
  /// @throws c10::TypeError, c10::ValueError  as ops::fused_sgd_. Nothing was changed.
  void run(const AmpStep& amp_step);
};

/// Hyperparameters of a parameter group.
struct AdamGroup {
  double lr = 0.0;
  at::Tensor lr_tensor;  ///< Replaces lr where it is defined.
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = false;  ///< AdamW.
  bool amsgrad = false;
  bool maximize = false;
};

/// The lists of Adam and AdamW on one device.
struct FASTAMP_API AdamLists : DeviceLists {
  using DeviceLists::DeviceLists;
  void add_group(const AdamGroup& group);

  BorrowedTensors exp_avgs;
  BorrowedTensors exp_avg_sqs;
  BorrowedTensors max_exp_avg_sqs;
  BorrowedTensors steps;
  BorrowedTensors moment_scales;
  std::vector<double> beta1;
  std::vector<double> beta2;
  std::vector<double> eps;
  std::vector<double> weight_decay;
  c10::List<bool> decoupled;
  c10::List<bool> amsgrad;
  c10::List<bool> maximize;
};

/// One step of Adam or AdamW.
class FASTAMP_API AdamStep : public ListedStep<AdamLists, AdamGroup> {
 public:
  /// Dtypes and shapes are those of ops::fused_adamw_. Tensors that a parameter does not use are
  /// ignored and may be undefined: max_exp_avg_sq without amsgrad, the master of an fp32 parameter.
  /// @param noise_origin  As in ops::fused_adamw_.
  /// @param scales  Those of uint8 moments; null for others.
  /// @returns False if the parameter was added before: it is stepped once, at its first position.
  bool add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq, const at::Tensor& step,
           const at::Tensor& master, std::int64_t noise_origin = -1,
           const at::Tensor* scales = nullptr) {
    auto& lists = for_device(param.device());
    if (!lists.add(param, grad, master)) [[unlikely]] {
      return false;
    }
    lists.exp_avgs.push_back(exp_avg);
    lists.exp_avg_sqs.push_back(exp_avg_sq);
    lists.steps.push_back(step);
    if (group().amsgrad) {
      lists.max_exp_avg_sqs.push_back(max_exp_avg_sq);
    }
    lists.add_noise(noise_origin);
    if (scales != nullptr) {
      lists.moment_scales.push_back(*scales);
    }
    return true;
  }

  /// Steps all parameters, or none: every device's lists are checked before the first op.
  /// @throws c10::TypeError, c10::ValueError  as ops::fused_adamw_. Nothing was changed.
  void run(const AmpStep& amp_step);
};

/// Returns what a step is asked for, with tensors on `device`. Copies between devices do not wait,
/// except to the CPU.
FASTAMP_API AmpStep amp_step_on(const AmpStep& amp_step, c10::Device device);

/// Whether the host knows, without waiting, that the step is not skipped.
bool steps_on_host(const AmpStep& amp_step);

}  // namespace fastamp::optim
