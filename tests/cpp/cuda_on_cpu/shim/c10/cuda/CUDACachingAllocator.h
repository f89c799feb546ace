// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>

#include <cuda_runtime_api.h>

namespace c10::cuda::CUDACachingAllocator {

/// Memory of the current stream: freed in its order, or with the graph that it captures.
class Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) {
    void* const memory = emulator::allocate_on_stream(bytes);
    if (emulator::current_stream().capture != nullptr) {
      return {memory, memory, [](void*) {}, c10::Device(c10::kCPU)};
    }
    auto* const block = new Block{memory, emulator::current_stream()};
    return {memory, block, &release, c10::Device(c10::kCPU)};
  }

 private:
  struct Block {
    void* memory;
    emulator::Stream& stream;
  };
  static void release(void* context) {
    auto* const block = static_cast<Block*>(context);
    emulator::free_on_stream(block->memory, block->stream);
    delete block;
  }
};
inline Allocator* get() {
  static Allocator instance;
  return &instance;
}
inline void emptyCache() {}

}  // namespace c10::cuda::CUDACachingAllocator
