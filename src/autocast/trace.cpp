#include "autocast/recorder.h"

#include <fastamp/autocast/registration.h>
#include <fastamp/autocast/trace.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <utility>

namespace fastamp {
namespace {

constexpr std::array<std::pair<std::string_view, TraceOrder>, 4> kOrders{{
    {"cast_bytes", TraceOrder::cast_bytes},
    {"casts", TraceOrder::casts},
    {"calls", TraceOrder::calls},
    {"name", TraceOrder::name},
}};

}  // namespace

Trace::Trace() : recorder_(std::make_shared<autocast::Recorder>(/*wants_source=*/false)) {
  install();
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

TraceOrder autocast::trace_order_of(const char* what, std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [order_name, order] : kOrders) {
    if (order_name == name) {
      return order;
    }
    known.push_back(order_name);
  }
  TORCH_CHECK_VALUE(false, what, " to be one of ", c10::Join(", ", known), ", got '", name, "'.");
}

TraceOrder trace_order_from_string(std::string_view name) {
  return autocast::trace_order_of("trace_order_from_string: expected name", name);
}

}  // namespace fastamp
