// SPDX-License-Identifier: Apache-2.0
#include "trace/events.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace fastamp::autocast {

std::atomic<int> g_open_traces{0};

namespace {

struct OpenTraces {
  std::mutex mutex;
  std::vector<std::shared_ptr<Recorder>> recorders;
};

/// Never destroyed: other threads may run ops while the process exits.
OpenTraces& open_traces() {
  static auto* traces = new OpenTraces;
  return *traces;
}

std::vector<std::shared_ptr<Recorder>> current_recorders() {
  auto& open = open_traces();
  const std::scoped_lock lock(open.mutex);
  return open.recorders;
}

std::atomic<CallSiteFinder> g_call_site_finder{nullptr};

CallSite find_call_site() {
  const CallSiteFinder finder = g_call_site_finder.load(std::memory_order_acquire);
  return finder == nullptr ? CallSite() : finder();
}

/// Hands a call to all open traces.
void record_call(CallKind kind, const CastCounts& casts) {
  // No lock is held while the source is looked for: it takes Python's.
  const auto recorders = current_recorders();
  const auto wants_source = [](const auto& recorder) { return recorder->wants_source(); };
  for (const auto& recorder : recorders) {
    if (!recorder->wants_source()) {
      recorder->add(kind, casts);
    }
  }
  if (std::ranges::any_of(recorders, wants_source)) {
    kind.site = find_call_site();
    for (const auto& recorder : recorders) {
      if (recorder->wants_source()) {
        recorder->add(kind, casts);
      }
    }
  }
}

thread_local TracedCall* t_call = nullptr;

std::atomic<NumelReader> g_numel_reader{nullptr};

std::optional<std::int64_t> numel_of(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) {
    return tensor.sym_numel().maybe_as_int();
  }
  const NumelReader reader = g_numel_reader.load(std::memory_order_relaxed);
  return reader == nullptr ? std::nullopt : reader(tensor);
}

}  // namespace

void set_numel_reader(NumelReader reader) {
  g_numel_reader.store(reader, std::memory_order_relaxed);
}

bool start_recording(const std::shared_ptr<Recorder>& recorder) {
  auto& open = open_traces();
  const std::scoped_lock lock(open.mutex);
  if (std::ranges::find(open.recorders, recorder) != open.recorders.end()) {
    return false;
  }
  open.recorders.push_back(recorder);
  g_open_traces.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool stop_recording(const std::shared_ptr<Recorder>& recorder) {
  auto& open = open_traces();
  const std::scoped_lock lock(open.mutex);
  if (std::erase(open.recorders, recorder) == 0) {
    return false;
  }
  g_open_traces.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

void set_call_site_finder(CallSiteFinder finder) {
  g_call_site_finder.store(finder, std::memory_order_release);
}

std::uint64_t bytes_of(const at::Tensor& tensor) {
  const auto numel = numel_of(tensor);
  return static_cast<std::uint64_t>(numel.value_or(0)) *
         static_cast<std::uint64_t>(tensor.element_size());
}

TracedCall::TracedCall(TracedOp op) : op_(std::move(op)), enclosing_(std::exchange(t_call, this)) {}

TracedCall::~TracedCall() {
  t_call = enclosing_;
  const auto ran_in = run_dtype();  // before the inputs are moved away
  try {
    record_call({.number = op_.number,
                 .device = op_.device,
                 .policy = op_.policy,
                 .inputs = std::move(inputs_),
                 .run_dtype = ran_in,
                 .float8 = float8_,
                 .site = {},
                 .op = std::move(op_.name)},
                casts_);
  } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory; the op goes on unrecorded
  }
}

TracedCall* TracedCall::current() { return t_call; }

void TracedCall::see(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  const bool eligible = op_.is_eligible(tensor);
  first_eligible_ = inputs_.empty() ? eligible : first_eligible_;
  any_eligible_ = any_eligible_ || eligible;
  any_forces_fp32_ = any_forces_fp32_ || (eligible && tensor.scalar_type() != op_.lower);
  any_sparse_ = any_sparse_ || tensor.is_sparse() || tensor.is_sparse_csr();
  inputs_.push_back(tensor.scalar_type());
}

void TracedCall::see(const std::optional<at::Tensor>& tensor) {
  if (tensor.has_value()) {
    see(*tensor);
  }
}

void TracedCall::see(const std::optional<c10::ScalarType>& dtype) { given_dtype_ = dtype; }

void TracedCall::see(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    see(tensor);
  }
}

void TracedCall::see(const at::ITensorListRef& tensors) {
  for (const at::Tensor& tensor : tensors) {
    see(tensor);
  }
}

c10::ScalarType TracedCall::run_dtype() const {
  const auto as_given = inputs_.empty() ? c10::ScalarType::Undefined : inputs_.front();
  switch (op_.policy) {
    case OpPolicy::kLower:
      return any_eligible_ ? op_.lower : as_given;
    case OpPolicy::kLowerDense:
      if (!any_eligible_) {
        return as_given;
      }
      return any_sparse_ ? c10::kFloat : op_.lower;
    case OpPolicy::kFp32:
      return any_eligible_ ? c10::kFloat : as_given;
    case OpPolicy::kPromote:
      if (!any_eligible_) {
        return as_given;
      }
      return any_forces_fp32_ ? c10::kFloat : op_.lower;
    case OpPolicy::kSetOptDtype:
      return given_dtype_.value_or(first_eligible_ ? c10::kFloat : as_given);
    case OpPolicy::kAppendDtype:
      return first_eligible_ ? c10::kFloat : as_given;
    case OpPolicy::kUnify:
      return given_dtype_.value_or(as_given);
    default:
      return as_given;
  }
}

void TracedCall::count(CastEvent event, std::uint64_t bytes) {
  switch (event) {
    case CastEvent::kWeightCast:
      ++casts_.weight_casts;
      break;
    case CastEvent::kOtherCast:
      ++casts_.other_casts;
      break;
    case CastEvent::kCacheHit:
      ++casts_.cache_hits;
      return;
    case CastEvent::kActivationHit:
      ++casts_.activation_hits;
      return;
    case CastEvent::kKeptHit:
      ++casts_.kept_hits;
      return;
  }
  casts_.cast_bytes += bytes;
}

void report_cast(CastEvent event, const at::Tensor& cast) {
  if (TracedCall* call = TracedCall::current()) {
    call->count(event, bytes_of(cast));
  }
}

void report_float8(Float8Outcome outcome) {
  if (TracedCall* call = TracedCall::current()) {
    call->note_float8(outcome);
  }
}

void report_gradient_cast(const at::Tensor& cast) {
  const auto bytes = bytes_of(cast);
  for (const auto& recorder : current_recorders()) {
    recorder->add_gradient_cast(bytes);
  }
}

}  // namespace fastamp::autocast
