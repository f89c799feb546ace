// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of the simulated NCCL's reductions, by torch's operators for the CPU: in the dtype
// of the tensors, one rank after the other.
#include "simulated_cuda/redirect/operators.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace simulated_cuda {
namespace {

enum Reduction : int { kSum = 0, kProduct, kMaximum, kMinimum, kAverage };

at::Tensor combine(const at::Tensor& one, const at::Tensor& other, int reduction) {
  switch (reduction) {
    case kProduct:
      return one * other;
    case kMaximum:
      return at::maximum(one, other);
    case kMinimum:
      return at::minimum(one, other);
    default:
      return one + other;
  }
}

}  // namespace
}  // namespace simulated_cuda

/// Called by the runtime (nccl.cpp): reduces what the ranks have sent, of NCCL's dtypes.
extern "C" void simulated_cuda_reduce(int dtype, int reduction, const char* const* parts,
                                      std::size_t ranks, std::size_t elements, void* to) {
  using namespace simulated_cuda;
  constexpr at::ScalarType kDtypes[] = {
      at::kChar, at::kByte,  at::kInt,    at::kUInt32,   at::kLong,          at::kUInt64,
      at::kHalf, at::kFloat, at::kDouble, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
  const BelowAutograd below;
  const auto tensor_of = [&](const void* memory) {
    return at::from_blob(const_cast<void*>(memory), {static_cast<std::int64_t>(elements)},
                         at::TensorOptions(kDtypes[dtype]));
  };
  const auto count = static_cast<double>(ranks);
  const bool divides_first = reduction == kAverage && at::isFloatingType(kDtypes[dtype]);
  const auto part = [&](std::size_t rank) {
    const at::Tensor sent = tensor_of(parts[rank]);
    return divides_first ? sent / count : sent;
  };
  at::Tensor result = part(0);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    result = combine(result, part(rank), reduction);
  }
  if (reduction == kAverage && !divides_first) {
    result = result.div(count, "trunc");
  }
  tensor_of(to).copy_(result);
}
