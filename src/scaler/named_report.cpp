// SPDX-License-Identifier: Apache-2.0
#include "scaler/named_report.h"

namespace fastamp::scaler {

ParameterNames names_by_identity(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  ParameterNames names;
  for (const auto& item : named_parameters) {
    names[item.value().unsafeGetTensorImpl()] = item.key();
  }
  return names;
}

OverflowReport named_report(const IterationLog::Overflow& overflow, const ParameterNames& names) {
  OverflowReport report;
  report.step = overflow.step;
  report.scale = overflow.scale;
  for (const auto& [record, counts] : overflow.optimizers) {
    for (const auto& [index, elements] : read_counts(counts)) {
      auto& row = report.gradients.emplace_back();
      describe(row, *record, index, names);
      row.inf = elements.inf;
      row.nan = elements.nan;
    }
  }
  return report;
}

}  // namespace fastamp::scaler
