// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reports on gradients of LibTorch's optimizers, with the names that the caller gives.

#include "core/tensor_kind.h"
#include "scaler/iteration_log.h"
#include "scaler/libtorch_optimizer.h"

#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstddef>
#include <string>
#include <unordered_map>

namespace fastamp::scaler {

/// Names of parameters, by the parameter's TensorImpl.
using ParameterNames = std::unordered_map<const void*, std::string>;
ParameterNames names_by_identity(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters);

/// Writes name and shape of an optimizer's parameter into a row of a report.
template <typename Row>
void describe(Row& row, const OptimizerRecord& record, std::size_t index,
              const ParameterNames& names) {
  row.name = "parameter " + std::to_string(index);
  row.index = index;
  // The optimizer had a parameter there when its gradient was counted.
  if (const auto parameter = handle_of(record).parameters.at(index).lock()) {
    if (has_geometry(at::Tensor(parameter))) {
      row.shape = parameter->sizes().vec();
    }
    const auto name = names.find(parameter.get());
    row.name = name != names.end() ? name->second : row.name;
  }
}

/// Finds what was not finite at an overflow. sync: waits for the device.
OverflowReport named_report(const IterationLog::Overflow& overflow, const ParameterNames& names);

}  // namespace fastamp::scaler
