// SPDX-License-Identifier: Apache-2.0
#include "autocast/trace.h"

#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/torch_state.h"
#include "trace/events.h"
#include "trace/recorder.h"
#include "trace/trace_text.h"

#include <fastamp/autocast/registration.h>
#include <fastamp/autocast/trace.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fastamp {
namespace autocast {
namespace {

template <PolicyDevice kDevice>
bool may_be_cast(const at::Tensor& tensor) {
  return is_eligible(tensor, kDevice);
}

}  // namespace

TracedOp traced_op(OpId op, PolicyDevice device) {
  return {.number = static_cast<std::uint16_t>(op),
          .name = short_name(op),
          .device = device_type(device),
          .policy = policy_of(op, device),
          .lower = region_dtype(device_type(device)),
          .is_eligible = device == PolicyDevice::kCpu ? may_be_cast<PolicyDevice::kCpu>
                                                      : may_be_cast<PolicyDevice::kCuda>};
}

}  // namespace autocast

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

}  // namespace fastamp
