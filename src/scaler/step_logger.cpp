// SPDX-License-Identifier: Apache-2.0
#include "scaler/step_logger.h"

#include "core/device_copy.h"
#include "trace/events.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace fastamp::scaler {
namespace {

/// One number, as a vector beside others.
at::Tensor number_beside(const at::Tensor& number, const at::Tensor& other) {
  return on_device(number.reshape({-1}), other.device(), at::kDouble);
}

}  // namespace

StepLogger::StepLogger(LogCallback callback, bool casts)
    : callback_(std::make_shared<const LogCallback>(std::move(callback))) {
  if (casts) {
    recorder_ = std::make_shared<autocast::Recorder>(/*wants_source=*/false);
    autocast::start_recording(recorder_);
  }
}

StepLogger::~StepLogger() { drop(); }

CastCounts StepLogger::casts_since_last() {
  if (recorder_ == nullptr) {
    return {};
  }
  const auto now = recorder_->totals();
  auto casts = now;
  casts -= std::exchange(counted_, now);
  return casts;
}

StepLogger::Rows StepLogger::prepare(std::int64_t step, const at::Tensor& ring_row,
                                     const std::vector<Outcome>& outcomes) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> numbers;
  std::vector<at::Tensor> zeros;
  std::vector<std::size_t> flags;
  std::vector<std::size_t> counts;
  bool counts_zeros = false;
  for (const auto& outcome : outcomes) {
    for (const auto& flag : outcome.flags) {
      numbers.push_back(number_beside(flag, ring_row));
    }
    for (const auto& counted : outcome.counts) {
      numbers.push_back(number_beside(at::sum(counted->counts), ring_row));
    }
    flags.push_back(outcome.flags.size());
    counts.push_back(outcome.counts.size());
    const auto& ranges = outcome.record->ranges;
    if (ranges.step() == step) {
      counts_zeros = true;
      for (const auto& counted : ranges.zeros()) {
        const auto sum = at::sum(counted.zeros, at::kDouble);
        zeros.push_back(number_beside(sum * counted.elements_of_each, ring_row));
      }
    }
  }
  numbers.insert(numbers.end(), zeros.begin(), zeros.end());
  const auto known = at::cat(numbers);
  const auto columns = ring_row.numel();
  const auto all = at::empty({columns + known.numel()}, known.options());
  all.narrow(0, columns, known.numel()).copy_(known);
  Rows prepared;
  prepared.push_back({.step = step,
                      .flags = std::move(flags),
                      .counts = std::move(counts),
                      .counts_zeros = counts_zeros,
                      .ring_row = ring_row,
                      .ring_numbers = all.narrow(0, 0, columns),
                      .readback = Readback({all})});
  return prepared;
}

void StepLogger::expect(Rows prepared) {
  if (is_released()) {
    return;
  }
  const at::NoGradGuard no_grad;
  auto& row = prepared.front();
  row.ring_numbers.copy_(std::exchange(row.ring_row, at::Tensor()));
  row.casts = casts_since_last();
  row.readback.start();
  pending_.splice(pending_.end(), prepared);
}

LoggedStep StepLogger::row_of(Pending& pending) {
  const auto values = pending.readback.values();
  auto next = values.begin();
  LoggedStep row;
  row.step = pending.step;
  row.scale = *next++;
  row.skipped = *next++ != 0.0;
  row.norm = *next++;
  row.growth_tracker = static_cast<std::int64_t>(*next++);
  for (std::size_t i = 0; i < pending.flags.size(); ++i) {
    const auto counts = next + static_cast<std::ptrdiff_t>(pending.flags[i]);
    const auto end = counts + static_cast<std::ptrdiff_t>(pending.counts[i]);
    // Without an overflow the counters still have those of the last one.
    const bool overflowed =
        std::any_of(next, counts, [](double flag) { return flag != 0.0; });  // NaN is not 0 either.
    for (next = counts; next != end; ++next) {
      row.overflows += overflowed ? static_cast<std::int64_t>(*next) : 0;
    }
  }
  if (pending.counts_zeros) {
    row.underflows = 0;
    for (; next != values.end(); ++next) {
      *row.underflows += std::llround(*next);
    }
  }
  row.casts = pending.casts;
  return row;
}

void StepLogger::pass_on(bool wait) {
  if (std::exchange(passing_on_, true)) {
    return;  // The callback has asked the scaler something; rows stay in order.
  }
  const std::unique_ptr<bool, void (*)(bool*)> end(&passing_on_, [](bool* flag) { *flag = false; });
  while (!pending_.empty() && (wait || pending_.front().readback.ready())) {
    auto row = row_of(pending_.front());
    pending_.pop_front();
    const auto callback = callback_;  // It may end the log.
    (*callback)(row);
  }
}

void StepLogger::release() {
  if (!is_released()) {
    pass_on(/*wait=*/true);
    drop();
  }
}

void StepLogger::drop() {
  callback_ = nullptr;
  pending_.clear();
  if (const auto recorder = std::exchange(recorder_, nullptr)) {
    autocast::stop_recording(recorder);
  }
}

}  // namespace fastamp::scaler
