// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device memory that is zero between kernels: counters that a kernel counts up and its last block
// sets back, so that no launch and no memset is spent on clearing them.
//
// Invariant: when a kernel that was given this memory has run, the memory is zero again. Kernels on
// one stream run one after the other, so each stream has memory of its own; it is zeroed once, when
// it is made, and lives as long as the process. A captured graph may be replayed on any stream,
// beside any other work, so a capture takes memory of the graph's pool and one memset node instead.

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>

namespace fastamp::kernels::cuda {

class ZeroedWorkspace {
 public:
  /// Takes memory for launches on `stream`, the current one of the current device. Thread-safe.
  ZeroedWorkspace(std::size_t bytes, c10::cuda::CUDAStream stream);

  /// Address of the bytes asked for, aligned to 256; valid for kernels launched while this lives.
  void* get() const { return memory_; }

 private:
  c10::DataPtr graph_memory_;
  void* memory_;
};

}  // namespace fastamp::kernels::cuda
