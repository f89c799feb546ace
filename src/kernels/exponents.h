// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/exponents.h"
#include "kernels/host_array.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fastamp::kernels {

/// Arguments of fastamp::count_exponents_, in the order of its schema.
struct ExponentArgs {
  at::TensorList tensors;
  const at::Tensor& exponents;
  const std::optional<at::Tensor>& zeros;
  std::int64_t every = 1;
  std::int64_t phase = 0;
  KnownArrays arrays = {};

  BlockSample sample() const { return {every, phase}; }
};

/// Whether all tensors are counted in one row.
inline bool shares_row(const ExponentArgs& args) { return args.exponents.size(0) == 1; }

/// The op on a device. The arguments have passed the checks of the op (src/ops).
void count_exponents_cpu(const ExponentArgs& args);
void count_exponents_cuda(const ExponentArgs& args);

}  // namespace fastamp::kernels
