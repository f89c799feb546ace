// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

namespace fastamp {

/// Puts fastamp's autocast kernels over torch's on AutocastCPU and AutocastCUDA, for the whole
/// process.
///
/// Idempotent and safe against concurrent calls of itself; takes about a millisecond, once. Ops
/// that another thread runs under autocast during the call may crash (torch's dispatch tables are
/// being changed): a program with threads that use autocast calls it before it starts them.
/// AutocastGuard calls it.
FASTAMP_API void register_kernels();

/// Gives torch's own autocast kernels back, exactly as they were. Idempotent.
///
/// For quiet moments such as tests: no other thread may be running ops under autocast.
/// @throws c10::Error if the calling thread is inside an autocast region.
FASTAMP_API void unregister_kernels();

/// True between register_kernels() and unregister_kernels(). Thread-safe.
FASTAMP_API bool kernels_registered();

}  // namespace fastamp
