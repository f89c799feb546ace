// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/tensors.h"

#include "cuda_on_cpu/emulator/memory_order.h"
#include "support/catch.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>

extern "C" {
// Of AddressSanitizer's runtime, if it is linked.
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* address, std::size_t size);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* address, std::size_t size);
}

namespace fastamp::test {
namespace {

constexpr std::size_t kMargin = 64;
constexpr unsigned char kPattern = 0xa5;

/// The memory of a tensor, with a margin on either side.
struct Guarded {
  unsigned char* memory;
  std::size_t front;
  std::size_t bytes;

  std::size_t size() const { return front + bytes + kMargin; }
  void protect() const {
    if (__asan_poison_memory_region != nullptr) {
      __asan_poison_memory_region(memory, front);
      __asan_poison_memory_region(memory + front + bytes, kMargin);
    }
  }
  void release() const {
    if (__asan_unpoison_memory_region != nullptr) {
      __asan_unpoison_memory_region(memory, size());
    }
    for (std::size_t i = 0; i < size(); ++i) {
      if ((i < front || i >= front + bytes) && memory[i] != kPattern) {
        FAIL_CHECK("memory " << (i < front ? "before" : "behind") << " a tensor of " << bytes
                             << " bytes was written");
        break;
      }
    }
    std::free(memory);
  }
};

}  // namespace

at::Tensor guarded(std::int64_t numel, at::ScalarType dtype, std::size_t offset) {
  const std::size_t size = c10::elementSize(dtype);
  const Guarded guards{nullptr, kMargin + offset * size, static_cast<std::size_t>(numel) * size};
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, guards.size()) != 0) {
    std::abort();
  }
  std::memset(memory, kPattern, guards.size());
  const Guarded held{static_cast<unsigned char*>(memory), guards.front, guards.bytes};
  held.protect();
  return at::from_blob(
      held.memory + held.front, {numel}, [held](void*) { held.release(); },
      at::TensorOptions(dtype));
}

at::Tensor turned(const at::Tensor& t) {
  const auto numel = t.numel();
  std::int64_t rows = 2;
  while (rows < numel && numel % rows != 0) {
    ++rows;
  }
  if (rows >= numel) {
    return t;
  }
  const std::int64_t matrices = numel / rows % 3 == 0 ? 3 : 1;
  return t.view({matrices, numel / rows / matrices, rows}).transpose(1, 2);
}

at::Tensor Values::tensor(std::int64_t numel, at::ScalarType dtype, std::size_t offset,
                          float spread) {
  auto t = guarded(numel, dtype, offset);
  std::normal_distribution<float> normal(0.0F, spread);
  for (std::int64_t i = 0; i < numel; ++i) {
    set_element(t, i, normal(random_));
  }
  return t;
}

at::Tensor Values::positive(std::int64_t numel, at::ScalarType dtype, std::size_t offset) {
  auto t = guarded(numel, dtype, offset);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  for (std::int64_t i = 0; i < numel; ++i) {
    set_element(t, i, std::abs(normal(random_)));
  }
  return t;
}

float element_of(const at::Tensor& t, std::int64_t index) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return t.const_data_ptr<float>()[index];
    case at::kHalf:
      return t.const_data_ptr<c10::Half>()[index];
    default:
      return t.const_data_ptr<c10::BFloat16>()[index];
  }
}

void set_element(const at::Tensor& t, std::int64_t index, float value) {
  switch (t.scalar_type()) {
    case at::kFloat:
      t.mutable_data_ptr<float>()[index] = value;
      break;
    case at::kDouble:
      t.mutable_data_ptr<double>()[index] = value;
      break;
    case at::kHalf:
      t.mutable_data_ptr<c10::Half>()[index] = value;
      break;
    default:
      t.mutable_data_ptr<c10::BFloat16>()[index] = value;
  }
}

at::Tensor scalar(float value) { return at::full({}, value, at::kFloat); }
float value_of(const at::Tensor& t) { return *t.const_data_ptr<float>(); }

at::Tensor copy_of(const at::Tensor& t) {
  const auto address = reinterpret_cast<std::uintptr_t>(t.const_data_ptr());
  auto copy = guarded(t.numel(), t.scalar_type(), address % 64 / c10::elementSize(t.scalar_type()));
  if (t.numel() != 0) {
    std::memcpy(copy.mutable_data_ptr(), t.const_data_ptr(), t.nbytes());
  }
  return copy;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& all) {
  std::vector<at::Tensor> copies;
  copies.reserve(all.size());
  for (const auto& t : all) {
    copies.push_back(copy_of(t));
  }
  return copies;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return same_bits(x, y); });
}

const std::vector<std::int64_t>& edge_sizes() {
  static const std::vector<std::int64_t> sizes = {
      1,   3,   4,   5,   0,   7,   8,   9,    15,   16,   17,   31,   33,   63,   127,
      128, 129, 255, 256, 257, 511, 513, 2047, 2048, 2049, 4095, 4096, 4097, 6143, 9000};
  return sizes;
}

std::vector<at::Tensor> edge_tensors(Values& values, Dtypes dtypes, std::size_t skew) {
  constexpr std::array<at::ScalarType, 4> kAll = {at::kFloat, at::kHalf, at::kBFloat16,
                                                  at::kDouble};
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < edge_sizes().size(); ++i) {
    const auto which = dtypes == Dtypes::kMixed ? (i + skew) % 4 : static_cast<std::size_t>(dtypes);
    tensors.push_back(values.tensor(edge_sizes()[i], kAll[which], i * skew % 9, 100.0F));
  }
  return tensors;
}

void for_each_shape(const std::function<void()>& body) {
  struct Way {
    emulator::Device device;
    emulator::Order order;
  };
  static const std::vector<Way> all = {{{1, 512}, emulator::Order::kRandom},
                                       {{1, 256}, emulator::Order::kForward},
                                       {{1, 2048}, emulator::Order::kReverse},
                                       {{3, 512}, emulator::Order::kRandom}};
  const std::size_t count = brief() ? 1 : all.size();
  for (std::size_t i = 0; i < count; ++i) {
    emulator::device() = all[i].device;
    emulator::set_order(all[i].order);
    body();
  }
}

bool brief() { return emulator::sees_races() && std::getenv("FASTAMP_EMULATE_LONG") == nullptr; }

}  // namespace fastamp::test
