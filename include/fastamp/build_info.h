// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <string>

namespace fastamp {

/// Versions and devices that this libfastamp was compiled from and for.
struct BuildInfo {
  std::string version;        ///< fastamp's own version, "major.minor.patch".
  std::string torch_version;  ///< torch release whose headers were used, e.g. "2.11.0".
  std::string cuda_version;   ///< CUDA toolkit release ("13.0"), or empty for a CPU-only build.
  std::string cuda_archs;     ///< Architectures compiled for ("80-real;90"), or empty.
  std::string compiler;       ///< C++ compiler and its version.
  std::string build_type;     ///< CMake build type.
};

/// Returns the facts fixed when the library was built. Thread-safe, no side effects.
FASTAMP_API BuildInfo build_info();

/// Returns why fastamp's kernels for CUDA are not in use, as a part of a sentence ("torch has no
/// CUDA"), or "" where they are. Opens their library if torch's CUDA part is in the process, and
/// warns, once, if that fails. Thread-safe.
FASTAMP_API std::string why_no_cuda_part();

}  // namespace fastamp
