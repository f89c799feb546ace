// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device memory, and which memory of the host is pinned.
//
// Stands for the memory of up to four devices. It is mapped twice: at the addresses that programs
// know no access is allowed, so that a host that reads or writes it is caught; the other mapping is
// for what computes in a device's place. Fresh memory is filled with 0xcd. With guards, each block
// ends at a page that nobody may touch, to within the 16 bytes that vectors need.
//
// Does not stand for: caches, peer access, managed and mapped memory, memory pools of streams.

#include <cstddef>
#include <vector>

namespace simulated_cuda {

inline constexpr std::size_t kDeviceBytes = std::size_t{8} << 30U;

/// Null: there is no room, or fail_allocations() says so.
void* allocate(int device, std::size_t bytes);
/// False: it is no block's address.
bool release(void* memory);
/// The device that has an address, or -1.
int device_of(const void* memory);
std::size_t bytes_in_use(int device);

/// From the `first`-th allocation from now on none succeeds, until memory is freed if so asked; 0:
/// all do again.
void fail_allocations(unsigned long first, bool until_freed);

void pin(const void* memory, std::size_t bytes);
void unpin(const void* memory);
bool is_pinned(const void* memory);

/// Contents of all blocks at a moment.
struct Snapshot {
  struct Block {
    void* memory;
    std::vector<char> contents;
  };
  std::vector<Block> blocks;
};
Snapshot take_snapshot();
/// Blocks that are younger keep what they hold: they may be what another capture reads and runs by.
void restore(const Snapshot& snapshot);

/// While one lives, the device's addresses can be used as such: for emulated kernels.
class DeviceCode {
 public:
  explicit DeviceCode(int device);
  ~DeviceCode();
  DeviceCode(const DeviceCode&) = delete;
  DeviceCode& operator=(const DeviceCode&) = delete;

 private:
  int device_;
};

}  // namespace simulated_cuda
