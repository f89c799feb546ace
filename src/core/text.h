// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ios>
#include <sstream>

namespace fastamp {

/// A stream for a text. It throws where memory fails: others leave out what they have no room for.
inline std::ostringstream new_text(int digits = 6) {
  std::ostringstream text;
  text.precision(digits);
  text.exceptions(std::ios::badbit);
  return text;
}

}  // namespace fastamp
