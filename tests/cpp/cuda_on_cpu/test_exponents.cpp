// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::count_exponents_. Tables are the CPU kernel's and those of a count by frexp,
// number by number, for every launch shape.

#include "cuda_on_cpu/tensors.h"
#include "kernels/exponents.h"
#include "support/catch.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>

using namespace fastamp::test;
using fastamp::kernels::count_exponents_cpu;
using fastamp::kernels::count_exponents_cuda;
using fastamp::kernels::kExponentColumns;

namespace {

at::Tensor table(std::int64_t rows, std::int64_t columns = kExponentColumns) {
  return at::zeros({rows, columns}, at::kLong);
}

/// By frexp and comparisons, without bits.
void count_slowly(const at::Tensor& t, std::int64_t* row, std::int64_t& zeros) {
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const float x = std::abs(element_of(t, i));
    if (x == 0.0F) {
      ++row[257];
      ++zeros;
    } else if (std::isnan(x)) {
      ++row[256];
    } else if (std::isinf(x)) {
      ++row[255];
    } else {
      int exponent = 0;
      std::frexp(x, &exponent);
      ++row[std::max(exponent + 126, 0)];
      const std::int64_t bits = std::bit_cast<std::uint32_t>(x);
      row[258] = std::max(row[258], bits);
      row[259] = std::max<std::int64_t>(row[259], 0x7f800000 - bits);
    }
  }
}

/// Numbers of all kinds in the dtypes that the op takes.
std::vector<at::Tensor> numbers(unsigned seed) {
  Values values(seed);
  std::vector<at::Tensor> all;
  constexpr std::array<at::ScalarType, 3> kTypes = {at::kFloat, at::kHalf, at::kBFloat16};
  for (std::size_t i = 0; i < edge_sizes().size(); ++i) {
    all.push_back(values.tensor(edge_sizes()[i], kTypes[(i + seed) % 3], i * seed % 9));
    const auto numel = all.back().numel();
    constexpr std::array<float, 8> kSpecial = {0.0F, -0.0F,  INFINITY, -INFINITY,
                                               NAN,  1e-40F, 6e-8F,    65504.0F};
    for (std::int64_t k = 0; k < std::min<std::int64_t>(numel / 2, 8); ++k) {
      set_element(all.back(), (k * 7 + 3) % numel, kSpecial[static_cast<std::size_t>(k)]);
    }
  }
  return all;
}

void check_case(const std::vector<at::Tensor>& tensors, bool together) {
  const auto count = static_cast<std::int64_t>(tensors.size());
  const auto rows = together ? 1 : count;
  const auto expected = table(rows);
  const auto expected_zeros = table(count, 1);
  for (std::int64_t i = 0; i < count; ++i) {
    count_slowly(tensors[static_cast<std::size_t>(i)],
                 expected.mutable_data_ptr<std::int64_t>() + (together ? 0 : i * kExponentColumns),
                 expected_zeros.mutable_data_ptr<std::int64_t>()[i]);
  }
  const auto before = copies_of(tensors);
  for (const auto kernel : {count_exponents_cuda, count_exponents_cpu}) {
    const auto found = table(rows);
    const std::optional<at::Tensor> zeros = table(count, 1);
    kernel({tensors, found, zeros});
    CHECK(same_bits(found, expected));
    CHECK(same_bits(*zeros, expected_zeros));
  }
  CHECK(same_bits(tensors, before));
}

}  // namespace

TEST_CASE("emulated exponents: each number in its column, for every launch shape", "[exponents]") {
  for (unsigned seed = 1; seed < (brief() ? 2U : 4U); ++seed) {
    const auto tensors = numbers(seed);
    for_each_shape([&] {
      check_case(tensors, false);
      check_case(tensors, true);
    });
  }
}

TEST_CASE("emulated exponents: a sample is what the CPU kernel counts", "[exponents]") {
  const auto tensors = numbers(3);
  const auto count = static_cast<std::int64_t>(tensors.size());
  for_each_shape([&] {
    for (const std::int64_t every : {2, 5, 128}) {
      std::int64_t counted = 0;
      for (std::int64_t phase = 0; phase < every; phase += brief() ? every : 1) {
        const auto on_cuda = table(count);
        const auto on_cpu = table(count);
        const std::optional<at::Tensor> on_cuda_zeros = table(count, 1);
        const std::optional<at::Tensor> on_cpu_zeros = table(count, 1);
        count_exponents_cuda({tensors, on_cuda, on_cuda_zeros, every, phase});
        count_exponents_cpu({tensors, on_cpu, on_cpu_zeros, every, phase});
        CHECK(same_bits(on_cuda, on_cpu));
        CHECK(same_bits(*on_cuda_zeros, *on_cpu_zeros));
        const fastamp::kernels::BlockSample sample{every, phase};
        for (std::int64_t i = 0; i < count; ++i) {
          const auto numel = sample.numel_of(i, tensors[static_cast<std::size_t>(i)].numel());
          CHECK(on_cpu[i].slice(0, 0, 258).sum().item<std::int64_t>() == numel);
          counted += numel;
        }
      }
      std::int64_t all = 0;
      for (const auto& tensor : tensors) {
        all += tensor.numel();
      }
      CHECK((brief() || counted == all));
    }
  });
}

TEST_CASE("emulated exponents: counts are added to what is there", "[exponents]") {
  const auto tensors = numbers(2);
  const std::optional<at::Tensor> none;
  const auto once = table(1);
  const auto twice = table(1);
  count_exponents_cuda({tensors, once, none});
  count_exponents_cuda({tensors, twice, none});
  count_exponents_cuda({tensors, twice, none});
  auto expected = once * 2;
  expected.slice(1, 258).copy_(once.slice(1, 258));
  CHECK(same_bits(twice, expected));
}

TEST_CASE("emulated exponents: more tensors than fit the kernel's arguments", "[exponents]") {
  if (brief()) {
    return;
  }
  Values values(3);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < 1300; ++i) {
    tensors.push_back(values.tensor(static_cast<std::int64_t>(i % 5), at::kFloat, i % 3));
  }
  check_case(tensors, false);
  check_case({}, true);
}

TEST_CASE("emulated exponents: a warp that counts one tensor after the other", "[exponents]") {
  // Of one dtype, so that the counts of all of them have the same place in shared memory.
  std::vector<at::Tensor> tensors;
  for (std::int64_t i = 0; i < (brief() ? 40 : 200); ++i) {
    tensors.push_back(at::zeros({i % 3 + 1}));
  }
  for_each_shape([&] { check_case(tensors, false); });
}
