// SPDX-License-Identifier: Apache-2.0
#include "scaler/iteration_log.h"

#include "core/text.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

namespace fastamp::scaler {
namespace {

constexpr std::int64_t kSkipsBeforeWarning = 20;

/// Whether 1 / scale, rounded to fp32, is a number that gradients may be multiplied by.
bool is_invertible(double scale) { return std::isfinite(static_cast<float>(1.0 / scale)); }

/// @param ring_row  As kernels::ScaleHistory lays it out, or empty.
StepRecord row_of_skip(std::int64_t step, double scale, std::span<const double> ring_row) {
  StepRecord row{.step = step, .scale = scale, .skipped = true};
  row.norm = std::numeric_limits<double>::quiet_NaN();
  if (!ring_row.empty()) {
    row.scale = ring_row[0];
    row.norm = ring_row[2];
    row.growth_tracker = static_cast<std::int64_t>(ring_row[3]);
  }
  return row;
}

}  // namespace

NonFiniteByPosition read_counts(const Counts& counts) {
  NonFiniteByPosition result;
  for (const auto& device : counts) {
    const auto host = device->counts.cpu();  // sync: a report is asked for, seldom
    const auto rows = host.accessor<std::int64_t, 2>();
    for (std::size_t i = 0; i < device->positions.size(); ++i) {
      const auto row = rows[static_cast<std::int64_t>(i)];
      if (row[0] != 0 || row[1] != 0) {
        result[device->positions[i]] = {.inf = row[0], .nan = row[1]};
      }
    }
  }
  return result;
}

void IterationLog::expect(const at::Tensor& scale, const std::vector<Outcome>& outcomes,
                          bool notifies, const at::Tensor& ring_row) {
  std::vector<at::Tensor> scalars{scale};
  for (const auto& outcome : outcomes) {
    scalars.insert(scalars.end(), outcome.flags.begin(), outcome.flags.end());
  }
  if (ring_row.defined()) {
    scalars.push_back(ring_row);
  }
  pending_.push_back({.number = iterations_,
                      .outcomes = outcomes,
                      .notifies = notifies,
                      .readback = Readback(scalars)});
  iterations_ += outcomes.empty() ? 0 : 1;
  poll(/*wait=*/false);
}

void IterationLog::poll(bool wait) {
  while (!pending_.empty() && (wait || pending_.front().readback.ready())) {
    auto iteration = std::move(pending_.front());
    pending_.pop_front();
    take_in(iteration);
  }
}

void IterationLog::take_in(Iteration& iteration) {
  const auto values = iteration.readback.values();
  const double before = std::exchange(scale_, values.front());
  auto flag = values.begin() + 1;
  Overflow overflow{.step = iteration.number, .scale = before, .optimizers = {}};
  for (auto& outcome : iteration.outcomes) {
    const auto end = flag + static_cast<std::ptrdiff_t>(outcome.flags.size());
    // NaN is not 0 either: any non-zero flag is an overflow.
    outcome.record->skipped = std::any_of(flag, end, [](double value) { return value != 0.0; });
    flag = end;
    if (outcome.record->skipped) {
      overflow.optimizers.emplace_back(outcome.record, std::move(outcome.counts));
    }
  }
  if (iteration.outcomes.empty()) {
    return;
  }
  skipped_ = !overflow.optimizers.empty();
  skipped_in_a_row_ = skipped_ ? skipped_in_a_row_ + 1 : 0;
  if (skipped_) {
    if (iteration.notifies) {
      const auto row = row_of_skip(iteration.number, before, {flag, values.end()});
      for (const auto& [record, counts] : overflow.optimizers) {
        skips_.push_back({.row = row, .optimizer = record});
      }
    }
    overflow_ = std::move(overflow);
    warn_if_due(before);
  }
}

void IterationLog::warn_if_due(double before) {
  const bool small = scale_ < 1.0 && before >= 1.0;
  const bool no_inverse = !is_invertible(before) || !is_invertible(scale_);
  auto what = new_text();
  if (no_inverse && !warned_of_inverse_) {
    warned_ = warned_of_inverse_ = true;
    what << "the loss scale is " << (is_invertible(before) ? scale_ : before)
         << ", and its inverse is not finite in fp32, so every step is skipped until "
            "update(new_scale) replaces it; min_scale keeps a scale from falling that far. If it "
            "has fallen, gradients were";
  } else if (!warned_ && (small || skipped_in_a_row_ >= kSkipsBeforeWarning)) {
    warned_ = true;
    if (small) {
      what << "the loss scale fell below 1 (to " << scale_ << ")";
    } else {
      what << skipped_in_a_row_ << " steps in a row were skipped";
    }
    what << ", so gradients are";
  } else {
    return;
  }
  what << " inf or NaN for a reason that a smaller scale does not cure";
  warning_ = what.str();
}

}  // namespace fastamp::scaler
