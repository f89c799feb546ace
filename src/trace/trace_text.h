// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/trace.h>
#include <fastamp/macros.h>

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

// A trace as people and programs read it. Exported for the Python module; not part of the public
// API.
namespace fastamp::autocast {

/// The sum over all rows.
FASTAMP_API CastCounts sum_of(const std::vector<TraceRow>& rows);

/// The rows as text, for people: see Trace::table().
FASTAMP_API std::string format_table(std::vector<TraceRow> rows, const GradientCasts& gradients,
                                     TraceOrder order, std::size_t row_limit);

/// The rows as a JSON object.
FASTAMP_API std::string format_json(const std::vector<TraceRow>& rows,
                                    const GradientCasts& gradients);

/// trace_order_from_string() whose errors begin with `what`, such as "table: expected sort_by".
FASTAMP_API TraceOrder trace_order_of(const char* what, std::string_view name);

/// "float32", "bfloat16": a dtype as Python calls it; "" for Undefined.
FASTAMP_API std::string dtype_name(c10::ScalarType dtype);

}  // namespace fastamp::autocast
