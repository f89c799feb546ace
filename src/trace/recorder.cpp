// SPDX-License-Identifier: Apache-2.0
#include "trace/recorder.h"

namespace fastamp {

CastCounts& CastCounts::operator+=(const CastCounts& other) {
  weight_casts += other.weight_casts;
  other_casts += other.other_casts;
  cast_bytes += other.cast_bytes;
  cache_hits += other.cache_hits;
  activation_hits += other.activation_hits;
  kept_hits += other.kept_hits;
  return *this;
}

CastCounts& CastCounts::operator-=(const CastCounts& earlier) {
  weight_casts -= earlier.weight_casts;
  other_casts -= earlier.other_casts;
  cast_bytes -= earlier.cast_bytes;
  cache_hits -= earlier.cache_hits;
  activation_hits -= earlier.activation_hits;
  kept_hits -= earlier.kept_hits;
  return *this;
}

namespace autocast {

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
    rows.push_back({kind.op, kind.device, kind.policy, kind.inputs, kind.run_dtype,
                    std::string(to_string(kind.float8)), kind.site.source, kind.site.module,
                    sum.calls, sum.casts});
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

}  // namespace autocast
}  // namespace fastamp
