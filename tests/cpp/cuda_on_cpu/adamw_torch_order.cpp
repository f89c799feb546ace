// SPDX-License-Identifier: Apache-2.0
// The kernel of fused_adamw.cu with products grouped as nvcc compiles it, beside the one that is
// compared with the CPU's.

#define FASTAMP_ADAM_ORDER kCuda
#define fused_adamw_cuda fused_adamw_cuda_in_torch_order  // NOLINT(readability-identifier-naming)

#include "kernels/cuda/fused_adamw.cu"
