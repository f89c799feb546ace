// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/policy.h>
#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fastamp {

namespace autocast {
class Recorder;
}

/// Numbers of casts: what happened to the arguments of op calls that had to be cast.
struct CastCounts {
  std::uint64_t weight_casts = 0;     ///< Casts made of float32 parameters.
  std::uint64_t other_casts = 0;      ///< Casts made of inputs, activations and anything else.
  std::uint64_t cast_bytes = 0;       ///< Size of the casts made, in bytes.
  std::uint64_t cache_hits = 0;       ///< Casts of weights found in the cache of the region.
  std::uint64_t activation_hits = 0;  ///< Casts of activations that shared an earlier one's memory.
  std::uint64_t kept_hits = 0;        ///< Casts of weights kept from an earlier region.

  std::uint64_t casts() const { return weight_casts + other_casts; }
  CastCounts& operator+=(const CastCounts& other);
  CastCounts& operator-=(const CastCounts& earlier);  ///< Leaves what came after an earlier count.
};

/// All calls of one op that looked the same to autocast.
struct TraceRow {
  std::string op;          ///< Name with overload as in the op table: "mm", "softmax.int".
  c10::DeviceType device;  ///< Whose policy was applied: c10::kCPU or c10::kCUDA.
  OpPolicy policy;         ///< The policy in force for these calls.
  std::vector<c10::ScalarType> inputs;  ///< Dtypes of the tensor arguments as given, in order.
  c10::ScalarType run_dtype;  ///< Dtype that castable arguments had when the op ran; Undefined if
                              ///< there were no tensors.
  std::string float8;  ///< In an fp8 region, of ops that can run in fp8: "float8" if they did (the
                       ///< casts are to fp8, the result is in run_dtype), else why not.
  std::string source;  ///< "file:line" of the Python call, if asked for and known, else empty.
  std::string module;  ///< The module around that call, as named_modules() of the outermost one
                       ///< names it; empty outside.
  std::uint64_t calls = 0;
  CastCounts casts;
};

/// Casts of gradients back to the dtype of what was cast, made by backward passes.
struct GradientCasts {
  std::uint64_t casts = 0;
  std::uint64_t bytes = 0;  ///< Size of the casts made, in bytes.
};

/// Order of the rows of a table; largest first, names ascending.
enum class TraceOrder : std::uint8_t { kCastBytes, kCasts, kCalls, kName };

/// Records every op call that fastamp's autocast kernels handle, on all threads of the process
/// (those of backward passes included), from construction until stop() or destruction.
///
/// Traces may be open at the same time, nested or not: each records all calls. Code that was
/// compiled or exported runs no autocast kernels and is not seen.
///
/// @code
///   fastamp::Trace trace;
///   train_step();
///   trace.stop();
///   std::cout << trace.table();
/// @endcode
///
/// Cost: one load and one branch per op call while no trace is open; under a microsecond per call
/// while one is. Thread-safe.
class FASTAMP_API Trace {
 public:
  Trace();
  ~Trace();

  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  Trace(Trace&&) = delete;
  Trace& operator=(Trace&&) = delete;

  /// Ends recording; what was recorded stays. Does nothing if it has ended already.
  void stop();

  /// Returns the rows recorded so far, in no particular order.
  std::vector<TraceRow> rows() const;
  GradientCasts gradient_casts() const;

  /// Sum over all rows.
  CastCounts totals() const;

  /// The rows as text, for people.
  /// @param order      What the rows are sorted by: numbers largest first, names from a to z.
  /// @param row_limit  Rows shown at most; the totals are over all of them.
  std::string table(TraceOrder order = TraceOrder::kCastBytes, std::size_t row_limit = 100) const;

  /// Everything recorded, as a JSON object; docs/trace.md lists its fields.
  std::string to_json() const;

 private:
  std::shared_ptr<autocast::Recorder> recorder_;
};

/// The order with this name: "cast_bytes", "casts", "calls" or "name".
/// @throws c10::ValueError, which lists the orders, if none has this name.
FASTAMP_API TraceOrder trace_order_from_string(std::string_view name);

}  // namespace fastamp
