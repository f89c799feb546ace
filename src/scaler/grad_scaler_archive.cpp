// SPDX-License-Identifier: Apache-2.0
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/List.h>
#include <ATen/core/TensorAccessor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstddef>
#include <string>
#include <vector>

namespace fastamp {
namespace {

// Entries carry torch's state_dict keys, so a reader of the archive meets familiar names.
constexpr const char* kEnabled = "enabled";

template <typename T>
void write_if(torch::serialize::OutputArchive& archive, const std::string& key,
              const std::optional<T>& value) {
  if (value) {
    archive.write(key, c10::IValue(*value));
  }
}

c10::IValue read(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value),
              "GradScaler::load: expected the archive of a GradScaler, "
              "got one without an entry \"",
              key, "\"");
  return value;
}

std::optional<double> read_double_if(torch::serialize::InputArchive& archive,
                                     const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<double>(value.toDouble()) : std::nullopt;
}

std::optional<int64_t> read_int_if(torch::serialize::InputArchive& archive,
                                   const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<int64_t>(value.toInt()) : std::nullopt;
}

// Rows of step, scale, skipped, norm, growth tracker: all exact in fp64.
constexpr int64_t kHistoryColumns = 5;

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

std::vector<StepRecord> history_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == at::kDouble && tensor.dim() == 2 && tensor.size(1) == kHistoryColumns,
      "GradScaler::load: expected a history of float64 [n, ", kHistoryColumns, "], got ",
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

OverflowReport read_report(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive entries;
  OverflowReport report;
  if (!archive.try_read("overflow_report", entries)) {
    return report;
  }
  report.step = read(entries, "step").toInt();
  report.scale = read(entries, "scale").toDouble();
  const auto names = read(entries, "names").toList();
  const auto shapes = read(entries, "shapes").toList();
  const auto numbers = read(entries, "numbers").toIntVector();
  TORCH_CHECK_VALUE(shapes.size() == names.size() && numbers.size() == 3 * names.size(),
                    "GradScaler::load: expected an overflow_report with as many shapes and "
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

}  // namespace

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  expect_not_moved_from("save");
  const auto current = state();
  archive.write(kEnabled, c10::IValue(current.has_value()));
  if (!current) {
    return;
  }
  archive.write("scale", c10::IValue(current->scale));
  archive.write("growth_factor", c10::IValue(current->growth_factor));
  archive.write("backoff_factor", c10::IValue(current->backoff_factor));
  archive.write("growth_interval", c10::IValue(current->growth_interval));
  archive.write("_growth_tracker", c10::IValue(current->growth_tracker));
  write_if(archive, "min_scale", current->min_scale);
  write_if(archive, "max_scale", current->max_scale);
  write_if(archive, "hysteresis", current->hysteresis);
  write_if(archive, "_hysteresis_tracker", current->hysteresis_tracker);
  write_if(archive, "fast_growth_interval", current->fast_growth_interval);
  write_if(archive, "_fast_growth_limit", current->fast_growth_limit);
  archive.write("history", history_tensor(current->history), /*is_buffer=*/true);
  write_report(archive, current->overflow_report);
  archive.write("skipped_in_a_row", c10::IValue(current->skipped_in_a_row));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  expect_not_moved_from("load");
  if (!is_enabled()) {
    return;
  }
  if (!read(archive, kEnabled).toBool()) {
    load_state(std::nullopt);
    return;
  }
  GradScalerState stored;
  stored.scale = read(archive, "scale").toDouble();
  stored.growth_factor = read(archive, "growth_factor").toDouble();
  stored.backoff_factor = read(archive, "backoff_factor").toDouble();
  stored.growth_interval = read(archive, "growth_interval").toInt();
  stored.growth_tracker = read(archive, "_growth_tracker").toInt();
  stored.min_scale = read_double_if(archive, "min_scale");
  stored.max_scale = read_double_if(archive, "max_scale");
  stored.hysteresis = read_int_if(archive, "hysteresis");
  stored.hysteresis_tracker = read_int_if(archive, "_hysteresis_tracker");
  stored.fast_growth_interval = read_int_if(archive, "fast_growth_interval");
  stored.fast_growth_limit = read_double_if(archive, "_fast_growth_limit");
  at::Tensor history;
  if (archive.try_read("history", history, /*is_buffer=*/true)) {
    stored.history = history_of(history);
  }
  stored.overflow_report = read_report(archive);
  stored.skipped_in_a_row = read_int_if(archive, "skipped_in_a_row").value_or(0);
  load_state(stored);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace fastamp
