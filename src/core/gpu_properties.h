// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace fastamp {

struct GpuProperties {
  std::string name;  ///< As the driver says it.
  int capability;    ///< As compute_capability().
  int multiprocessors;
  double peak_bandwidth;  ///< Bytes/s of the memory; 0 if the driver does not say.
};

}  // namespace fastamp
