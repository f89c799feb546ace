// SPDX-License-Identifier: Apache-2.0
#include "autocast/trace/recorder.h"
#include "autocast/trace/trace_text.h"
#include "autocast/trace/tracing.h"

#include <fastamp/autocast/registration.h>
#include <fastamp/autocast/trace.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

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

Trace::Trace() : recorder_(std::make_shared<autocast::Recorder>(/*wants_source=*/false)) {
  register_kernels();
  autocast::start_recording(recorder_);
}

Trace::~Trace() { stop(); }

void Trace::stop() { autocast::stop_recording(recorder_); }

std::vector<TraceRow> Trace::rows() const { return recorder_->rows(); }

GradientCasts Trace::gradient_casts() const { return recorder_->gradient_casts(); }

CastCounts Trace::totals() const { return autocast::sum_of(rows()); }

std::string Trace::table(TraceOrder order, std::size_t row_limit) const {
  return autocast::format_table(rows(), gradient_casts(), order, row_limit);
}

std::string Trace::to_json() const { return autocast::format_json(rows(), gradient_casts()); }

TraceOrder trace_order_from_string(std::string_view name) {
  return autocast::trace_order_of("trace_order_from_string: expected name", name);
}

}  // namespace fastamp
