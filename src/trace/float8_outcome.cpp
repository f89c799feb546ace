// SPDX-License-Identifier: Apache-2.0
#include "trace/float8_outcome.h"

namespace fastamp::autocast {

std::string_view to_string(Float8Outcome outcome) {
  switch (outcome) {
    case Float8Outcome::kNotAsked:
      return "";
    case Float8Outcome::kRan:
      return "float8";
    case Float8Outcome::kOp:
      return "op not in recipe";
    case Float8Outcome::kIntercepted:
      return "tensor kind, mode or transform";
    case Float8Outcome::kDtype:
      return "dtype";
    case Float8Outcome::kArguments:
      return "not x times a weight";
    case Float8Outcome::kNoWeight:
      return "second operand is no weight";
    case Float8Outcome::kExcluded:
      return "excluded";
    case Float8Outcome::kShape:
      return "K or N not a multiple of 16";
    case Float8Outcome::kEmpty:
      return "empty";
    case Float8Outcome::kSmall:
      return "K and N within small_size";
  }
  return "";
}

}  // namespace fastamp::autocast
