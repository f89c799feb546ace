// SPDX-License-Identifier: Apache-2.0
#include "autocast/api/lowered_weights.h"

#include <fastamp/autocast/convert.h>

#include <c10/core/ScalarType.h>

#include <ostream>

namespace fastamp {
namespace {

constexpr double kMegabyte = 1e6;

}  // namespace

std::ostream& operator<<(std::ostream& out, const Conversion& conversion) {
  std::size_t converted = 0;
  for (const auto& parameter : conversion.parameters) {
    converted += parameter.is_converted ? 1 : 0;
  }
  out << converted << " of " << conversion.parameters.size() << " parameters in "
      << conversion.dtype << ", " << static_cast<double>(conversion.bytes_after) / kMegabyte
      << " MB instead of " << static_cast<double>(conversion.bytes_before) / kMegabyte << '\n';
  for (const auto& parameter : conversion.parameters) {
    if (!parameter.is_converted) {
      out << "  stays: " << parameter.name << " (" << parameter.reason << ")\n";
    }
  }
  return out;
}

Conversion convert(torch::nn::Module& module, c10::ScalarType dtype,
                   const std::function<void()>& forward) {
  return autocast::lower_weights(autocast::find_lowered_weights("convert", module, dtype, forward),
                                 dtype);
}

}  // namespace fastamp
