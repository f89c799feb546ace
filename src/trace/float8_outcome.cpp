// SPDX-License-Identifier: Apache-2.0
#include "trace/float8_outcome.h"

namespace fastamp::autocast {

std::string_view to_string(Float8Outcome outcome) {
  switch (outcome) {
    case Float8Outcome::not_asked:
      return "";
    case Float8Outcome::ran:
      return "float8";
    case Float8Outcome::op:
      return "op not in recipe";
    case Float8Outcome::intercepted:
      return "tensor kind, mode or transform";
    case Float8Outcome::dtype:
      return "dtype";
    case Float8Outcome::arguments:
      return "not x times a weight";
    case Float8Outcome::no_weight:
      return "second operand is no weight";
    case Float8Outcome::excluded:
      return "excluded";
    case Float8Outcome::shape:
      return "K or N not a multiple of 16";
    case Float8Outcome::empty:
      return "empty";
    case Float8Outcome::small:
      return "K and N within small_size";
  }
  return "";
}

}  // namespace fastamp::autocast
