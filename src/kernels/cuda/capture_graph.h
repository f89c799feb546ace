// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/captured_graph.h"

#include <c10/core/Device.h>

#include <memory>

namespace fastamp::kernels::cuda {

/// Implements CudaDevices::capture_graph (core/cuda_part.h).
std::unique_ptr<CapturedGraph> capture_graph(c10::Device device, const CapturePhases& phases);

}  // namespace fastamp::kernels::cuda
