// SPDX-License-Identifier: Apache-2.0
#include "autocast/trace/recorder.h"

#include "autocast/table/op_names.h"

namespace fastamp::autocast {

void Recorder::add(const CallKind& kind, const CastCounts& casts) {
  const std::scoped_lock lock(mutex_);
  Sum& sum = sums_[kind];
  ++sum.calls;
  sum.casts += casts;
}

void Recorder::add_gradient_cast(std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  ++gradient_casts_.casts;
  gradient_casts_.bytes += bytes;
}

std::vector<TraceRow> Recorder::rows() const {
  std::vector<TraceRow> rows;
  const std::scoped_lock lock(mutex_);
  rows.reserve(sums_.size());
  for (const auto& [kind, sum] : sums_) {
    rows.push_back({short_name(kind.op), device_type(kind.device), kind.policy, kind.inputs,
                    kind.run_dtype, std::string(to_string(kind.float8)), kind.source, sum.calls,
                    sum.casts});
  }
  return rows;
}

CastCounts Recorder::totals() const {
  CastCounts totals;
  const std::scoped_lock lock(mutex_);
  for (const auto& [kind, sum] : sums_) {
    totals += sum.casts;
  }
  return totals;
}

GradientCasts Recorder::gradient_casts() const {
  const std::scoped_lock lock(mutex_);
  return gradient_casts_;
}

}  // namespace fastamp::autocast
