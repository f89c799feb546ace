// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the environment says about the device. Read once; tools/simulated_cuda.py sets it.

namespace simulated_cuda {

inline constexpr int kMostDevices = 4;

struct Settings {
  int devices;       ///< SIMULATED_CUDA_DEVICES: 1 to 4, or 0 for none; 2 by default.
  int capability;    ///< SIMULATED_CUDA_CAPABILITY: 80, 90 (default), 100.
  bool guards;       ///< SIMULATED_CUDA_GUARDS: an inaccessible page behind each allocation.
  bool trace;        ///< SIMULATED_CUDA_TRACE
  bool redirects;    ///< Unless SIMULATED_CUDA_NO_REDIRECT is set.
  bool starts_late;  ///< SIMULATED_CUDA_LATE: work runs as late as the calls that wait allow.
};

const Settings& settings();

}  // namespace simulated_cuda
