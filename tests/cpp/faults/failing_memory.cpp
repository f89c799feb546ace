// SPDX-License-Identifier: Apache-2.0
#include "faults/failing_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr std::int64_t kNever = -1;
thread_local std::int64_t allocations_before = kNever;
thread_local bool has_happened = false;
thread_local bool all_from_here = false;

void count_allocation() {
  if (allocations_before == kNever) {
    return;
  }
  if (allocations_before == 0) {
    allocations_before = all_from_here ? 0 : kNever;
    has_happened = true;
    throw std::bad_alloc();
  }
  --allocations_before;
}

void* counted(std::size_t size, std::size_t alignment) {
  count_allocation();
  const std::size_t whole = (size + alignment - 1) / alignment * alignment;
  void* memory = alignment <= alignof(std::max_align_t) ? std::malloc(size == 0 ? 1 : size)
                                                        : std::aligned_alloc(alignment, whole);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

/// torch's allocator of host memory, with the same count.
class Tensors final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    count_allocation();
    return torchs_->allocate(size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return torchs_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    torchs_->copy_data(to, from, count);
  }

 private:
  c10::Allocator* torchs_ = c10::GetDefaultCPUAllocator();
};

}  // namespace

// NOLINTBEGIN(*-new-delete-overloads, *-no-malloc, cppcoreguidelines-owning-memory): these are them
void* operator new(std::size_t size) { return counted(size, 1); }
void* operator new[](std::size_t size) { return counted(size, 1); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t /*alignment*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t /*alignment*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/, std::align_val_t /*alignment*/) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t /*size*/,
                       std::align_val_t /*alignment*/) noexcept {
  std::free(memory);
}
// NOLINTEND(*-new-delete-overloads, *-no-malloc, cppcoreguidelines-owning-memory)

namespace fastamp::test {

FailingMemory::FailingMemory(std::int64_t before, Fails fails) {
  static Tensors tensors;
  static const bool set [[maybe_unused]] = [] {
    c10::SetAllocator(c10::kCPU, &tensors, 100);
    return true;
  }();
  has_happened = false;
  all_from_here = fails == Fails::kAllFrom;
  allocations_before = before;
}

FailingMemory::~FailingMemory() { allocations_before = kNever; }

bool FailingMemory::happened() { return has_happened; }

}  // namespace fastamp::test
