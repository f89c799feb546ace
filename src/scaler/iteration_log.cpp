// SPDX-License-Identifier: Apache-2.0
#include "scaler/iteration_log.h"

#include "core/text.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <ios>
#include <limits>
#include <new>
#include <span>
#include <utility>

namespace fastamp::scaler {
namespace {

constexpr std::int64_t kSkipsBeforeWarning = 20;

/// Whether 1 / scale, rounded to fp32, is a number that gradients may be multiplied by.
bool is_invertible(double scale) { return std::isfinite(static_cast<float>(1.0 / scale)); }

bool lacks_inverse(double before, double after) {
  return !is_invertible(before) || !is_invertible(after);
}

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

IterationLog::Iterations IterationLog::prepare(const at::Tensor& scale,
                                               std::vector<Outcome> outcomes, bool notifies,
                                               const at::Tensor& ring_row) {
  std::vector<at::Tensor> scalars{scale};
  for (const auto& outcome : outcomes) {
    scalars.insert(scalars.end(), outcome.flags.begin(), outcome.flags.end());
  }
  if (ring_row.defined()) {
    scalars.push_back(ring_row);
  }
  Iterations prepared;
  prepared.push_back(
      {.outcomes = std::move(outcomes), .notifies = notifies, .readback = Readback(scalars)});
  return prepared;
}

void IterationLog::expect(Iterations prepared) {
  auto& iteration = prepared.front();
  iteration.readback.start();
  iteration.number = iterations_;
  iterations_ += iteration.outcomes.empty() ? 0 : 1;
  pending_.splice(pending_.end(), prepared);
}

void IterationLog::poll(bool wait) {
  while (!pending_.empty() && (wait || pending_.front().readback.ready())) {
    take_in(pending_.front());
    Iterations done;
    done.splice(done.begin(), pending_, pending_.begin());
  }
}

void IterationLog::poll_if_possible(bool wait) {
  try {
    poll(wait);
  } catch (const std::bad_alloc&) {          // NOLINT(bugprone-empty-catch): see the header
  } catch (const std::ios_base::failure&) {  // NOLINT(bugprone-empty-catch): a warning's text
  }
}

// Changes what is known at its end, when nothing can fail any more.
void IterationLog::take_in(const Iteration& iteration) {
  const auto values = iteration.readback.values();
  const double before = scale_;
  const double after = values.front();
  if (iteration.outcomes.empty()) {
    scale_ = after;
    return;
  }
  auto flag = values.begin() + 1;
  Overflow overflow{.step = iteration.number, .scale = before, .optimizers = {}};
  for (const auto& outcome : iteration.outcomes) {
    const auto end = flag + static_cast<std::ptrdiff_t>(outcome.flags.size());
    // NaN is not 0 either: any non-zero flag is an overflow.
    outcome.record->skipped = std::any_of(flag, end, [](double value) { return value != 0.0; });
    flag = end;
    if (outcome.record->skipped) {
      overflow.optimizers.emplace_back(outcome.record, outcome.counts);
    }
  }
  const bool skipped = !overflow.optimizers.empty();
  const auto skipped_in_a_row = skipped ? skipped_in_a_row_ + 1 : 0;
  std::list<Skip> skips;
  std::optional<std::string> warning;
  if (skipped && iteration.notifies) {
    const auto row = row_of_skip(iteration.number, before, {flag, values.end()});
    for (const auto& [record, counts] : overflow.optimizers) {
      skips.push_back({.row = row, .optimizer = record});
    }
  }
  if (skipped) {
    warning = warning_due(before, after, skipped_in_a_row);
  }
  scale_ = after;
  skipped_ = skipped;
  skipped_in_a_row_ = skipped_in_a_row;
  skips_.splice(skips_.end(), skips);
  if (skipped) {
    overflow_ = std::move(overflow);
  }
  if (warning) {
    warned_ = true;
    warned_of_inverse_ = warned_of_inverse_ || lacks_inverse(before, after);
    warning_ = std::move(warning);
  }
}

/// Returns what the user is to be warned of after a skipped step, unless that was done.
/// @param skipped  Steps in a row.
std::optional<std::string> IterationLog::warning_due(double before, double after,
                                                     std::int64_t skipped) const {
  const bool small = after < 1.0 && before >= 1.0;
  auto what = new_text();
  if (lacks_inverse(before, after) && !warned_of_inverse_) {
    what << "the loss scale is " << (is_invertible(before) ? after : before)
         << ", and its inverse is not finite in fp32, so every step is skipped until "
            "update(new_scale) replaces it; min_scale keeps a scale from falling that far. If it "
            "has fallen, gradients were";
  } else if (!warned_ && (small || skipped >= kSkipsBeforeWarning)) {
    if (small) {
      what << "the loss scale fell below 1 (to " << after << ")";
    } else {
      what << skipped << " steps in a row were skipped";
    }
    what << ", so gradients are";
  } else {
    return std::nullopt;
  }
  what << " inf or NaN for a reason that a smaller scale does not cure";
  return what.str();
}

}  // namespace fastamp::scaler
