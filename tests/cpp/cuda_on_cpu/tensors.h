// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors for the emulated kernels: at chosen addresses, with guards around them.

#include "cuda_on_cpu/emulator/emulator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace fastamp::test {

/// A tensor that starts `offset` elements off a 64-byte boundary. Under AddressSanitizer no access
/// goes beyond it; without, the test fails if a byte around it has changed.
at::Tensor guarded(std::int64_t numel, at::ScalarType dtype, std::size_t offset = 0);

/// Normally distributed values, the same in each run of a test.
class Values {
 public:
  explicit Values(unsigned seed) : random_(seed) {}
  at::Tensor tensor(std::int64_t numel, at::ScalarType dtype, std::size_t offset = 0,
                    float spread = 3.0F);
  at::Tensor positive(std::int64_t numel, at::ScalarType dtype, std::size_t offset = 0);

 private:
  std::mt19937 random_;
};

/// The same memory as matrices column by column, if its size is not prime: as channels that come
/// last, or a matrix that was transposed.
at::Tensor turned(const at::Tensor& t);

float element_of(const at::Tensor& t, std::int64_t index);
void set_element(const at::Tensor& t, std::int64_t index, float value);
at::Tensor scalar(float value);
float value_of(const at::Tensor& t);

/// At the same distance from a 64-byte boundary.
at::Tensor copy_of(const at::Tensor& t);
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& all);
bool same_bits(const at::Tensor& a, const at::Tensor& b);
bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// Sizes around vectors, warps, chunks; 0 among them.
const std::vector<std::int64_t>& edge_sizes();

/// What edge_tensors() may be of: a dtype, or all that gradients may have, in turn.
enum class Dtypes : std::uint8_t { kFloat, kHalf, kBFloat16, kDouble, kMixed };

/// A tensor of each edge size; the i-th starts (i * skew) % 9 elements off.
std::vector<at::Tensor> edge_tensors(Values& values, Dtypes dtypes, std::size_t skew);

/// Calls `body` in each way to run a kernel: launch shapes, each with another order of threads;
/// fewer where each thread costs much.
void for_each_shape(const std::function<void()>& body);

/// Whether cases are to be few: under ThreadSanitizer, unless the environment asks for a long run.
bool brief();

}  // namespace fastamp::test
