// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trace/float8_outcome.h"

#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/trace.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// Exported for the Python module; not part of the public API.
namespace fastamp::autocast {

/// Place where Python calls an op; empty if it does not.
struct CallSite {
  std::string source;  ///< "file:line".
  std::string module;  ///< Name of the module whose forward pass it is in.

  auto operator<=>(const CallSite&) const = default;
};

/// Key that distinguishes the rows of a trace.
struct CallKind {
  std::uint16_t number;  ///< The op's: rows are in the order of these.
  c10::DeviceType device;
  OpPolicy policy;
  std::vector<c10::ScalarType> inputs;
  c10::ScalarType run_dtype;
  Float8Outcome float8;
  CallSite site;
  std::string op;

  auto operator<=>(const CallKind&) const = default;
};

/// The memory of one trace. Thread-safe.
class FASTAMP_API Recorder {
 public:
  /// @param wants_source  Whether the line and module of Python that made calls distinguish them.
  explicit Recorder(bool wants_source) : wants_source_(wants_source) {}

  bool wants_source() const { return wants_source_; }
  void add(const CallKind& kind, const CastCounts& casts);
  void add_gradient_cast(std::uint64_t bytes);

  std::vector<TraceRow> rows() const;
  CastCounts totals() const;  ///< Sum over all rows.
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

}  // namespace fastamp::autocast
