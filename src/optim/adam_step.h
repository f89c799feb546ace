// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/step_lists.h"

#include <ATen/core/List.h>

#include <cstdint>
#include <utility>

namespace fastamp::optim {

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

/// Collects the parameters of one step of Adam or AdamW, then runs one fused op per device.
///
/// begin_group() for each group, add() for each of its parameters that has a gradient, run().
/// Parameters and state are borrowed: they must live, unmoved, until this is destroyed. Not
/// thread-safe.
class FASTAMP_API AdamStep {
 public:
  /// @param expected  How many parameters will follow; a hint.
  void begin_group(const AdamGroup& group, std::size_t expected) {
    lists_.begin_group(group, expected);
  }

  /// Dtypes and shapes are those of ops::fused_adamw_. Tensors that a parameter does not use are
  /// ignored and may be undefined: max_exp_avg_sq without amsgrad, the master of an fp32 parameter.
  /// @param noise_origin  As in ops::fused_adamw_.
  /// @param scales  Those of uint8 moments; null for others.
  /// @returns False if the parameter was added before: it is stepped once, at its first position.
  bool add(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq, const at::Tensor& step,
           const at::Tensor& master, std::int64_t noise_origin = -1,
           const at::Tensor* scales = nullptr) {
    auto& lists = lists_.for_device(param.device());
    if (!lists.add(param, grad, master)) [[unlikely]] {
      return false;
    }
    lists.exp_avgs.push_back(exp_avg);
    lists.exp_avg_sqs.push_back(exp_avg_sq);
    lists.steps.push_back(step);
    if (lists_.group().amsgrad) {
      lists.max_exp_avg_sqs.push_back(max_exp_avg_sq);
    }
    lists.add_noise(noise_origin);
    if (scales != nullptr) {
      lists.moment_scales.push_back(*scales);
    }
    return true;
  }

  /// A 16-bit copy of the parameter added last, float32, that the step is to write.
  void add_copy(const at::Tensor& param, at::Tensor weight_copy) {
    lists_.for_device(param.device()).add_copy(std::move(weight_copy));
  }

  /// Steps all parameters, or none: every device's lists are checked before the first op.
  /// @throws c10::TypeError, c10::ValueError  as ops::fused_adamw_. Nothing was changed.
  void run(const AmpStep& amp_step);

 private:
  struct Lists : DeviceLists {
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

  ListsByDevice<Lists, AdamGroup> lists_;
};

}  // namespace fastamp::optim
