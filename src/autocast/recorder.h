#pragma once

#include "autocast/op_ids.h"

#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/trace.h>

#include <c10/core/ScalarType.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

// Exported for the Python module; not part of the public API.
namespace fastamp::autocast {

/// What distinguishes the rows of a trace.
struct CallKind {
  OpId op;
  Column column;
  OpPolicy policy;
  std::vector<c10::ScalarType> inputs;
  c10::ScalarType run_dtype;
  std::string source;

  auto operator<=>(const CallKind&) const = default;
};

/// The memory of one trace. Thread-safe.
class FASTAMP_API Recorder {
 public:
  /// @param wants_source  Whether calls are told apart by the line of Python that made them.
  explicit Recorder(bool wants_source) : wants_source_(wants_source) {}

  bool wants_source() const { return wants_source_; }
  void add(const CallKind& kind, const CastCounts& casts);
  void add_gradient_cast(std::uint64_t bytes);

  std::vector<TraceRow> rows() const;
  GradientCasts gradient_casts() const;

 private:
  struct Sum {
    std::uint64_t calls = 0;
    CastCounts casts;
  };

  const bool wants_source_;
  mutable std::mutex mutex_;
  std::map<CallKind, Sum> sums_;
  GradientCasts gradient_casts_;
};

/// Lets a recorder hear of all calls from now on, or no more. False if it did (not) before.
FASTAMP_API bool start_recording(const std::shared_ptr<Recorder>& recorder);
FASTAMP_API bool stop_recording(const std::shared_ptr<Recorder>& recorder);

/// Hands a call to all open traces.
void record_call(CallKind kind, const CastCounts& casts);
void record_gradient_cast(std::uint64_t bytes);

/// Finds "file:line" of the Python code that is calling now; empty if there is none. The Python
/// module sets it once.
using SourceFinder = std::string (*)();
FASTAMP_API void set_source_finder(SourceFinder finder);

FASTAMP_API CastCounts sum_of(const std::vector<TraceRow>& rows);
FASTAMP_API std::string format_table(std::vector<TraceRow> rows, const GradientCasts& gradients,
                                     TraceOrder order, std::size_t row_limit);
/// trace_order_from_string() for a caller whose errors begin otherwise: "table: expected sort_by".
FASTAMP_API TraceOrder trace_order_of(const char* what, std::string_view name);
FASTAMP_API std::string format_json(const std::vector<TraceRow>& rows,
                                    const GradientCasts& gradients);

/// "float32", "bfloat16": a dtype as Python calls it; "" for Undefined.
FASTAMP_API std::string dtype_name(c10::ScalarType dtype);

}  // namespace fastamp::autocast
