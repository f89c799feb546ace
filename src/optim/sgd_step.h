// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/narrow_moments.h"
#include "optim/step_lists.h"

#include <ATen/core/List.h>

#include <cstdint>
#include <utility>

namespace fastamp::optim {

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

/// Collects the parameters of one SGD step, then runs one fused op per device.
///
/// begin_group() for each group, add() for each of its parameters that has a gradient, run().
/// Parameters and state are borrowed: they must live, unmoved, until this is destroyed. Not
/// thread-safe.
class FASTAMP_API SgdStep {
 public:
  /// @param expected  How many parameters will follow; a hint.
  void begin_group(const SgdGroup& group, std::size_t expected) {
    lists_.begin_group(group, expected);
  }

  /// Dtypes and shapes are those of ops::fused_sgd_. Tensors that a parameter does not use are
  /// ignored and may be undefined: the momentum tensors without momentum, the master of an fp32
  /// parameter.
  /// @param noise_origin  As in ops::fused_sgd_; ignored where the momentum needs no noise.
  /// @returns False if the parameter was added before: it is stepped once, at its first position.
  bool add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& momentum_buffer,
           const at::Tensor& momentum_step, const at::Tensor& master,
           std::int64_t noise_origin = -1) {
    auto& lists = lists_.for_device(param.device());
    if (!lists.add(param, grad, master)) [[unlikely]] {
      return false;
    }
    if (lists.momentum.back() != 0.0) {
      lists.momentum_buffers.push_back(momentum_buffer);
      lists.momentum_steps.push_back(momentum_step);
    }
    lists.add_noise(needs_noise(lists_.group().momentum) ? noise_origin : -1);
    return true;
  }

  /// To be called before a gradient is added that is a copy of the parameter's: a copy does not
  /// show by itself that its parameter is listed again.
  void look_up_repeats(const at::Tensor& param) {
    lists_.for_device(param.device()).look_up_repeats();
  }

  /// A 16-bit copy of the parameter added last, float32, that the step is to write.
  void add_copy(const at::Tensor& param, at::Tensor weight_copy) {
    lists_.for_device(param.device()).add_copy(std::move(weight_copy));
  }

  /// Steps all parameters, or none: every device's lists are checked before the first op.
  /// @throws c10::TypeError, c10::ValueError  as ops::fused_sgd_. Nothing was changed.
  void run(const AmpStep& amp_step);

 private:
  struct Lists : DeviceLists {
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

  ListsByDevice<Lists, SgdGroup> lists_;
};

}  // namespace fastamp::optim
