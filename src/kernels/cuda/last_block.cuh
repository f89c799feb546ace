// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/launch_plan.h"

namespace fastamp::kernels::cuda {

/// True for all threads of the block that is the last of its grid to call this; every thread of
/// every block calls it once. *arrivals is 0 before the kernel and 0 again after it.
///
/// Why the last block may read what the others wrote, and write what they read: a block's accesses
/// come before the barrier, the barrier before thread 0's fence, and the fence before its increment
/// (fences are cumulative: they order what the thread has learnt of through the barrier as well).
/// Increments of one counter are ordered; the last one follows all others, and the fence and the
/// barrier after it pass that order on to the whole block. atomicInc wraps to 0 at its bound, which
/// is reached once, by the last block: nothing has to be cleared.
__device__ __forceinline__ bool last_to_arrive(unsigned* arrivals) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(arrivals, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace fastamp::kernels::cuda
