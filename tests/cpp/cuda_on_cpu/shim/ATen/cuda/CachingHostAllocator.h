// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pinned memory, given out again (here: freed) as soon as it is released or, where an event was
// recorded, when the stream has come to that.

#include "cuda_on_cpu/emulator/grid.h"
#include "cuda_on_cpu/emulator/runtime.h"

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdlib>

namespace emulator {

class HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) {
    check(!refused_in_capture("cudaHostAlloc"), "pinned memory is not allocated under capture");
    auto* const block = new Block{make_device_memory(bytes), nullptr};
    return {block->memory, block, &release, c10::Device(c10::kCPU)};
  }
  bool record_event(void* /*memory*/, void* context, c10::Stream stream) {
    static_cast<Block*>(context)->user = &stream_of_id(stream.id());
    return true;
  }

 private:
  struct Block {
    void* memory;
    Stream* user;
  };
  static void release(void* context) {
    auto* const block = static_cast<Block*>(context);
    if (block->user != nullptr) {
      free_on_stream(block->memory, *block->user);
    } else {
      std::free(block->memory);
    }
    delete block;
  }
};

}  // namespace emulator

namespace at {

// Static: libtorch_cpu has a function of this name.
static inline emulator::HostAllocator* getHostAllocator(c10::DeviceType) {
  static emulator::HostAllocator instance;
  return &instance;
}

}  // namespace at
