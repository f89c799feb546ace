#include "autocast/recorder.h"

#include "autocast/op_names.h"
#include "autocast/tracing.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace fastamp {

CastCounts& CastCounts::operator+=(const CastCounts& other) {
  weight_casts += other.weight_casts;
  other_casts += other.other_casts;
  cast_bytes += other.cast_bytes;
  cache_hits += other.cache_hits;
  ring_hits += other.ring_hits;
  kept_hits += other.kept_hits;
  return *this;
}

namespace autocast {
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

std::atomic<SourceFinder> g_source_finder{nullptr};

std::string find_source() {
  const SourceFinder finder = g_source_finder.load(std::memory_order_relaxed);
  return finder == nullptr ? std::string() : finder();
}

}  // namespace

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
    rows.push_back({short_name(kind.op), device_type(kind.column), kind.policy, kind.inputs,
                    kind.run_dtype, kind.source, sum.calls, sum.casts});
  }
  return rows;
}

GradientCasts Recorder::gradient_casts() const {
  const std::scoped_lock lock(mutex_);
  return gradient_casts_;
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
    kind.source = find_source();
    for (const auto& recorder : recorders) {
      if (recorder->wants_source()) {
        recorder->add(kind, casts);
      }
    }
  }
}

void record_gradient_cast(std::uint64_t bytes) {
  for (const auto& recorder : current_recorders()) {
    recorder->add_gradient_cast(bytes);
  }
}

void set_source_finder(SourceFinder finder) {
  g_source_finder.store(finder, std::memory_order_relaxed);
}

}  // namespace autocast
}  // namespace fastamp
