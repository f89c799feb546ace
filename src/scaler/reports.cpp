// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

#include <fastamp/scaler/grad_scaler.h>
#include <fastamp/scaler/reports.h>

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <ostream>

namespace fastamp {
namespace {

// Powers of two up to 2^33 as they are.
constexpr int kDigits = 10;

template <typename T>
void append_if(std::ostream& text, const char* name, const std::optional<T>& value) {
  if (value) {
    text << ", " << name << ' ' << *value;
  }
}

}  // namespace

std::string OverflowReport::str() const {
  if (step < 0) {
    return "No step was skipped.";
  }
  auto text = new_text();
  text << "Step " << step << " was skipped at scale " << scale << ": " << gradients.size()
       << (gradients.size() == 1 ? " gradient" : " gradients") << " with inf or NaN.";
  auto worst_first = gradients;
  std::ranges::stable_sort(worst_first, std::ranges::greater{},
                           [](const auto& gradient) { return gradient.inf + gradient.nan; });
  for (const auto& gradient : worst_first) {
    text << "\n  " << gradient.name << "  " << c10::IntArrayRef(gradient.shape) << "  inf "
         << gradient.inf << "  NaN " << gradient.nan;
  }
  return text.str();
}

double UnderflowReport::share_of_zeros(double other) const {
  return range.share_of_zeros(at::kHalf, std::lround(std::log2(other / scale)));
}

double UnderflowReport::largest_scale() const {
  const auto shift = range.largest_shift(at::kHalf);
  return shift ? std::ldexp(scale, static_cast<int>(*shift)) : 0.0;
}

std::string UnderflowReport::str() const {
  if (step < 0) {
    return "No gradients were counted.";
  }
  constexpr double kPercent = 100.0;
  auto text = new_text();
  text << "Step " << step << " at scale " << scale << ": " << range.zeros() << " of "
       << range.elements() << " gradient elements ("
       << kPercent * range.share_of_zeros(at::kHalf, 0) << " %) are 0";
  if (elements > range.elements()) {
    text << ", in a sample of " << elements;
  }
  text << '.';
  if (const auto largest = largest_scale(); largest > 0.0) {
    text << " Finite in fp16 up to scale " << largest << '.';
  }
  const auto share = [](const ZerosOfGradient& gradient) {
    return static_cast<double>(gradient.zeros) / static_cast<double>(gradient.elements);
  };
  auto worst_first = gradients;
  std::ranges::stable_sort(worst_first, std::ranges::greater{}, share);
  for (const auto& gradient : worst_first) {
    text << "\n  " << gradient.name << "  " << c10::IntArrayRef(gradient.shape) << "  zeros "
         << gradient.zeros << " of " << gradient.elements;
  }
  return text.str();
}

// Each is put together aside, so that the flags of the stream stay as they are.
std::ostream& operator<<(std::ostream& out, const OverflowReport& report) {
  return out << report.str();
}

std::ostream& operator<<(std::ostream& out, const UnderflowReport& report) {
  return out << report.str();
}

std::ostream& operator<<(std::ostream& out, const StepRecord& record) {
  auto text = new_text(kDigits);
  text << "step " << record.step << (record.skipped ? ": skipped" : ": stepped") << ", scale "
       << record.scale << ", norm ";
  if (std::isnan(record.norm)) {
    text << "unknown";
  } else {
    text << record.norm;
  }
  text << ", growth_tracker " << record.growth_tracker;
  return out << text.str();
}

std::ostream& operator<<(std::ostream& out, const std::vector<StepRecord>& history) {
  const char* separator = "";
  for (const auto& record : history) {
    out << separator << record;
    separator = "\n";
  }
  return out;
}

std::ostream& operator<<(std::ostream& out, const GradScalerState& state) {
  auto text = new_text(kDigits);
  text << "scale " << state.scale << ", growth_factor " << state.growth_factor
       << ", backoff_factor " << state.backoff_factor << ", growth_interval "
       << state.growth_interval << ", growth_tracker " << state.growth_tracker;
  append_if(text, "min_scale", state.min_scale);
  append_if(text, "max_scale", state.max_scale);
  append_if(text, "hysteresis", state.hysteresis);
  append_if(text, "hysteresis_tracker", state.hysteresis_tracker);
  append_if(text, "fast_growth_interval", state.fast_growth_interval);
  append_if(text, "fast_growth_limit", state.fast_growth_limit);
  if (state.skipped_in_a_row > 0) {
    text << "\nskipped in a row: " << state.skipped_in_a_row;
  }
  if (!state.history.empty()) {
    text << "\nhistory of steps " << state.history.front().step << " to "
         << state.history.back().step;
  }
  if (state.overflow_report) {
    text << '\n' << state.overflow_report;
  }
  return out << text.str();
}

}  // namespace fastamp
