// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace fastamp::autocast {

/// Outcome of a call in a region with an fp8 recipe.
enum class Float8Outcome : std::uint8_t {
  kNotAsked,  ///< No recipe is in force, or the op is none that can run in fp8.
  kRan,
  // Why it ran in the base dtype:
  kOp,           ///< The recipe does not name the op.
  kIntercepted,  ///< A subclass, a mode, functorch or a tangent; or a tensor that is not ordinary.
  kDtype,
  kArguments,  ///< Not x times a weight plus a bias, or wrong: torch's op says what is.
  kNoWeight,   ///< The second operand of mm, addmm or matmul is no trained parameter.
  kExcluded,
  kShape,  ///< K or N is no multiple of 16.
  kEmpty,
  kSmall,  ///< K and N are at most the recipe's small_size.
};

/// Returns it as the rows of a trace show it: "" for not_asked, "float8" for ran, else the reason.
std::string_view to_string(Float8Outcome outcome);

}  // namespace fastamp::autocast
