// SPDX-License-Identifier: Apache-2.0
// Emulated: casts of many tensors in one launch have the CPU kernel's bits, which are torch's.

#include "cuda_on_cpu/tensors.h"
#include "kernels/cpu/dense_cast.h"
#include "kernels/cuda/dense_cast.h"
#include "support/catch.h"

#include <array>
#include <cmath>

using namespace fastamp::test;
using fastamp::kernels::cpu::cast_contiguous;
using fastamp::kernels::cuda::cast_together;

namespace {

at::Tensor cpu_cast(const at::Tensor& source, at::ScalarType to) {
  auto result = guarded(source.numel(), to);
  cast_contiguous(source.const_data_ptr(), at::kFloat, result.mutable_data_ptr(), to,
                  source.numel());
  return result;
}

void check_casts(std::size_t source_skew, std::size_t cast_skew, float spread) {
  constexpr std::array<at::ScalarType, 2> kTypes = {at::kHalf, at::kBFloat16};
  Values values(4);
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> casts;
  std::vector<at::Tensor> expected;
  for (std::size_t i = 0; i < edge_sizes().size(); ++i) {
    const auto to = kTypes[i % 2];
    sources.push_back(values.tensor(edge_sizes()[i], at::kFloat, i * source_skew % 5, spread));
    if (edge_sizes()[i] > 8) {
      set_element(sources.back(), 7, NAN);
      set_element(sources.back(), 8, -INFINITY);
    }
    casts.push_back(guarded(edge_sizes()[i], to, i * cast_skew % 9));
    expected.push_back(cpu_cast(sources.back(), to));
  }
  cast_together(sources, casts);
  CHECK(same_bits(casts, expected));
}

}  // namespace

TEST_CASE("emulated cast: every size, alignment and dtype", "[cast]") {
  for_each_shape([] {
    check_casts(0, 0, 1e4F);
    check_casts(1, 0, 1e-6F);
    check_casts(0, 1, 1e5F);
    check_casts(3, 7, 1.0F);
  });
}

TEST_CASE("emulated cast: nothing to cast", "[cast]") {
  const auto launches = emulator::statistics().launches;
  cast_together({}, {});
  const std::vector<at::Tensor> sources = {guarded(0, at::kFloat)};
  const std::vector<at::Tensor> casts = {guarded(0, at::kHalf)};
  cast_together(sources, casts);
  CHECK(emulator::statistics().launches == launches);
}
