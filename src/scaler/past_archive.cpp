// SPDX-License-Identifier: Apache-2.0
#include "scaler/past_archive.h"

#include <ATen/core/List.h>
#include <ATen/core/TensorAccessor.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>

namespace fastamp::scaler {
namespace {

// Rows of step, scale, skipped, norm, growth tracker: all exact in fp64.
constexpr int64_t kHistoryColumns = 5;

}  // namespace

c10::IValue read_entry(const std::string& function, torch::serialize::InputArchive& archive,
                       const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), function, ": expected the archive of a ",
              function.substr(0, function.find(':')), ", got one without an entry \"", key, "\"");
  return value;
}

at::Tensor history_tensor(const std::vector<StepRecord>& history) {
  auto result = at::empty({static_cast<int64_t>(history.size()), kHistoryColumns}, at::kDouble);
  auto rows = result.accessor<double, 2>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const auto& record = history[static_cast<std::size_t>(i)];
    rows[i][0] = static_cast<double>(record.step);
    rows[i][1] = record.scale;
    rows[i][2] = record.skipped ? 1.0 : 0.0;
    rows[i][3] = record.norm;
    rows[i][4] = static_cast<double>(record.growth_tracker);
  }
  return result;
}

std::vector<StepRecord> history_in_archive(const std::string& function, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == at::kDouble && tensor.dim() == 2 && tensor.size(1) == kHistoryColumns,
      function, ": expected a history of float64 [n, ", kHistoryColumns, "], got ",
      tensor.toString(), " ", tensor.sizes());
  const auto host = tensor.cpu();
  const auto rows = host.accessor<double, 2>();
  std::vector<StepRecord> result;
  result.reserve(static_cast<std::size_t>(rows.size(0)));
  for (int64_t i = 0; i < rows.size(0); ++i) {
    result.push_back({.step = static_cast<int64_t>(rows[i][0]),
                      .scale = rows[i][1],
                      .skipped = rows[i][2] != 0.0,
                      .norm = rows[i][3],
                      .growth_tracker = static_cast<int64_t>(rows[i][4])});
  }
  return result;
}

void write_report(torch::serialize::OutputArchive& archive, const OverflowReport& report) {
  c10::List<std::string> names;
  c10::List<c10::List<int64_t>> shapes;
  c10::List<int64_t> numbers;
  for (const auto& gradient : report.gradients) {
    names.push_back(gradient.name);
    shapes.push_back(c10::List<int64_t>(gradient.shape));
    numbers.append(
        c10::List<int64_t>({static_cast<int64_t>(gradient.index), gradient.inf, gradient.nan}));
  }
  torch::serialize::OutputArchive entries(archive.compilation_unit());
  entries.write("step", c10::IValue(report.step));
  entries.write("scale", c10::IValue(report.scale));
  entries.write("names", c10::IValue(names));
  entries.write("shapes", c10::IValue(shapes));
  entries.write("numbers", c10::IValue(numbers));
  archive.write("overflow_report", entries);
}

OverflowReport read_report(const std::string& function, torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive entries;
  OverflowReport report;
  if (!archive.try_read("overflow_report", entries)) {
    return report;
  }
  report.step = read_entry(function, entries, "step").toInt();
  report.scale = read_entry(function, entries, "scale").toDouble();
  const auto names = read_entry(function, entries, "names").toList();
  const auto shapes = read_entry(function, entries, "shapes").toList();
  const auto numbers = read_entry(function, entries, "numbers").toIntVector();
  TORCH_CHECK_VALUE(shapes.size() == names.size() && numbers.size() == 3 * names.size(), function,
                    ": expected an overflow_report with as many shapes and "
                    "numbers as names");
  for (std::size_t i = 0; i < names.size(); ++i) {
    report.gradients.push_back({.name = names.get(i).toStringRef(),
                                .index = static_cast<std::size_t>(numbers[3 * i]),
                                .shape = shapes.get(i).toIntVector(),
                                .inf = numbers[3 * i + 1],
                                .nan = numbers[3 * i + 2]});
  }
  return report;
}

}  // namespace fastamp::scaler
