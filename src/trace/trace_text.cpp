// SPDX-License-Identifier: Apache-2.0
#include "trace/trace_text.h"

#include "core/text.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <tuple>
#include <utility>

namespace fastamp::autocast {
namespace {

constexpr std::array<std::pair<std::string_view, TraceOrder>, 4> kOrders{{
    {"cast_bytes", TraceOrder::kCastBytes},
    {"casts", TraceOrder::kCasts},
    {"calls", TraceOrder::kCalls},
    {"name", TraceOrder::kName},
}};

/// "float32, float32, int64": runs of one dtype are folded, since lists can be long.
std::string folded(const std::vector<c10::ScalarType>& dtypes) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < dtypes.size();) {
    std::size_t end = i;
    while (end < dtypes.size() && dtypes[end] == dtypes[i]) {
      ++end;
    }
    const auto count = end - i;
    parts.push_back(dtype_name(dtypes[i]) + (count > 1 ? " x" + std::to_string(count) : ""));
    i = end;
  }
  return c10::Join(", ", parts);
}

std::string device_name(c10::DeviceType device) {
  return c10::DeviceTypeName(device, /*lower_case=*/true);
}

/// 1536 -> "1.50 KiB"
std::string readable_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) {
    return std::to_string(bytes) + " B";
  }
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s", value, kUnits[unit]);
  return text.data();
}

void sort_rows(std::vector<TraceRow>& rows, TraceOrder order) {
  const auto size = [order](const TraceRow& row) -> std::uint64_t {
    switch (order) {
      case TraceOrder::kCastBytes:
        return row.casts.cast_bytes;
      case TraceOrder::kCasts:
        return row.casts.casts();
      case TraceOrder::kCalls:
        return row.calls;
      case TraceOrder::kName:
        break;
    }
    return 0;
  };
  const auto calls = [order](const TraceRow& row) {
    return order == TraceOrder::kName ? 0 : row.calls;
  };
  std::ranges::stable_sort(rows, [&](const TraceRow& a, const TraceRow& b) {
    return std::make_tuple(size(b), calls(b), a.op) < std::make_tuple(size(a), calls(a), b.op);
  });
}

using Cells = std::vector<std::string>;

Cells cells_of(const CastCounts& casts) {
  return {std::to_string(casts.weight_casts),    std::to_string(casts.other_casts),
          readable_bytes(casts.cast_bytes),      std::to_string(casts.cache_hits),
          std::to_string(casts.activation_hits), std::to_string(casts.kept_hits)};
}

void append(Cells& cells, Cells more) { std::ranges::move(more, std::back_inserter(cells)); }

/// The columns that are shown only where a row has something to say in them.
struct ShownColumns {
  bool float8 = false;
  bool module = false;
  bool source = false;

  std::size_t text_columns() const {
    return 5 + static_cast<std::size_t>(float8) + static_cast<std::size_t>(module) +
           static_cast<std::size_t>(source);
  }
};

Cells heading(ShownColumns shown) {
  Cells cells{"Op", "Device", "Policy", "Input dtypes", "Runs in"};
  if (shown.float8) {
    cells.emplace_back("In fp8");
  }
  if (shown.module) {
    cells.emplace_back("Module");
  }
  if (shown.source) {
    cells.emplace_back("Source");
  }
  append(cells, {"Calls", "Weight casts", "Other casts", "Cast size", "Cache hits",
                 "Activation hits", "Kept hits"});
  return cells;
}

std::string in_float8(const std::string& outcome) {
  if (outcome.empty()) {
    return "-";
  }
  return outcome == "float8" ? "yes" : "no: " + outcome;
}

Cells cells_of(const TraceRow& row, ShownColumns shown) {
  Cells cells{row.op, device_name(row.device), std::string(to_string(row.policy)),
              folded(row.inputs), dtype_name(row.run_dtype)};
  if (shown.float8) {
    cells.push_back(in_float8(row.float8));
  }
  if (shown.module) {
    cells.push_back(row.module.empty() ? "-" : row.module);
  }
  if (shown.source) {
    cells.push_back(row.source.empty() ? "-" : row.source);
  }
  cells.push_back(std::to_string(row.calls));
  append(cells, cells_of(row.casts));
  return cells;
}

/// Names left-aligned, numbers right-aligned, rules around the heading and the end.
std::string lay_out(const std::vector<Cells>& lines, std::size_t text_columns) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& cells : lines) {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      widths[i] = std::max(widths[i], cells[i].size());
    }
  }
  std::string rule;
  for (const auto width : widths) {
    rule += std::string(width, '-') + "  ";
  }
  rule.replace(rule.size() - 2, 2, "\n");
  std::string out = rule;
  for (std::size_t line = 0; line < lines.size(); ++line) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string padding(widths[i] - lines[line][i].size(), ' ');
      const bool last = i + 1 == widths.size();
      out += i < text_columns ? lines[line][i] + padding : padding + lines[line][i];
      out += last ? "\n" : "  ";
    }
    if (line == 0) {
      out += rule;
    }
  }
  return out + rule;
}

// -- JSON

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + '"';
}

void write_counts(std::ostream& out, const CastCounts& casts) {
  out << "\"weight_casts\": " << casts.weight_casts << ", \"other_casts\": " << casts.other_casts
      << ", \"cast_bytes\": " << casts.cast_bytes << ", \"cache_hits\": " << casts.cache_hits
      << ", \"activation_hits\": " << casts.activation_hits
      << ", \"kept_hits\": " << casts.kept_hits;
}

void write_row(std::ostream& out, const TraceRow& row) {
  std::vector<std::string> inputs;
  inputs.reserve(row.inputs.size());
  for (const auto dtype : row.inputs) {
    inputs.push_back(in_quotes(dtype_name(dtype)));
  }
  out << "{\"op\": " << in_quotes(row.op) << ", \"device\": " << in_quotes(device_name(row.device))
      << ", \"policy\": " << in_quotes(to_string(row.policy)) << ", \"inputs\": ["
      << c10::Join(", ", inputs) << "], \"run_dtype\": " << in_quotes(dtype_name(row.run_dtype))
      << ", \"float8\": " << in_quotes(row.float8) << ", \"source\": " << in_quotes(row.source)
      << ", \"module\": " << in_quotes(row.module) << ", \"calls\": " << row.calls << ", ";
  write_counts(out, row.casts);
  out << "}";
}

}  // namespace

std::string dtype_name(c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Undefined) {
    return "";
  }
  const auto [name, legacy_name] = c10::getDtypeNames(dtype);
  return {name.data(), name.size()};
}

CastCounts sum_of(const std::vector<TraceRow>& rows) {
  CastCounts sum;
  for (const auto& row : rows) {
    sum += row.casts;
  }
  return sum;
}

std::string format_table(std::vector<TraceRow> rows, const GradientCasts& gradients,
                         TraceOrder order, std::size_t row_limit) {
  const CastCounts totals = sum_of(rows);
  std::uint64_t calls = 0;
  for (const auto& row : rows) {
    calls += row.calls;
  }
  sort_rows(rows, order);
  const auto left_out = rows.size() - std::min(rows.size(), row_limit);
  rows.erase(rows.end() - static_cast<std::ptrdiff_t>(left_out), rows.end());
  const ShownColumns shown{
      .float8 = std::ranges::any_of(rows, [](const auto& row) { return !row.float8.empty(); }),
      .module = std::ranges::any_of(rows, [](const auto& row) { return !row.module.empty(); }),
      .source = std::ranges::any_of(rows, [](const auto& row) { return !row.source.empty(); })};

  std::vector<Cells> lines{heading(shown)};
  for (const auto& row : rows) {
    lines.push_back(cells_of(row, shown));
  }
  Cells total{"Total"};
  total.resize(shown.text_columns());
  total.push_back(std::to_string(calls));
  append(total, cells_of(totals));
  lines.push_back(std::move(total));

  auto out = new_text();
  out << lay_out(lines, shown.text_columns());
  if (left_out > 0) {
    out << left_out << " more rows\n";
  }
  out << "Gradients cast back: " << gradients.casts << " (" << readable_bytes(gradients.bytes)
      << ")\n";
  return out.str();
}

std::string format_json(const std::vector<TraceRow>& rows, const GradientCasts& gradients) {
  auto out = new_text();
  out << "{\"ops\": [";
  for (std::size_t i = 0; i < rows.size(); ++i) {
    out << (i == 0 ? "\n  " : ",\n  ");
    write_row(out, rows[i]);
  }
  out << '\n' << R"(], "totals": {)";
  write_counts(out, sum_of(rows));
  out << R"(}, "gradient_casts": {"casts": )" << gradients.casts << R"(, "bytes": )"
      << gradients.bytes << "}}";
  return out.str();
}

TraceOrder trace_order_of(const char* what, std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [order_name, order] : kOrders) {
    if (order_name == name) {
      return order;
    }
    known.push_back(order_name);
  }
  TORCH_CHECK_VALUE(false, what, " to be one of ", c10::Join(", ", known), ", got '", name, "'.");
}

}  // namespace fastamp::autocast

namespace fastamp {

TraceOrder trace_order_from_string(std::string_view name) {
  return autocast::trace_order_of("trace_order_from_string: expected name", name);
}

}  // namespace fastamp
