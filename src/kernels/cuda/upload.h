// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>

namespace fastamp::kernels::cuda {

/// Whether the driver takes kernel arguments of kMaxArgBytes.
bool takes_large_arguments();

/// Brings small host data to device memory on `stream`, the current one, without waiting for it.
///
/// `fill` writes the bytes to the address it is given (8-byte aligned, on the host). They go by one
/// async copy from pinned memory or, where the stream is being captured, in the arguments of
/// kernels (launch_plan.h says why). The memory may be freed once the work that uses it has been
/// launched: the allocator orders its reuse by the stream.
c10::DataPtr upload(std::size_t bytes, c10::function_ref<void(void*)> fill,
                    c10::cuda::CUDAStream stream);

}  // namespace fastamp::kernels::cuda
