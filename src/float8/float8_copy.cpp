// SPDX-License-Identifier: Apache-2.0
#include "float8/float8_copy.h"

#include "core/interception.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "kernels/cpu/float8.h"
#include "kernels/cuda_kernels.h"
#include "kernels/functors/float8_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace fastamp::autocast {
namespace {

constexpr auto kHeaderBytes = static_cast<std::int64_t>(kernels::kFloat8HeaderBytes);
constexpr std::int64_t kCopyAlignment = 16;

/// Another tensor over the memory of `bytes`, no view of it.
at::Tensor over(const at::Tensor& bytes, c10::ScalarType dtype, std::int64_t offset,
                at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::empty({0}, bytes.options().dtype(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(bytes.storage());
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void* address_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

void refresh_on_cpu(const SteppedFloat8Copy& copy) {
  const at::Tensor& weight = *copy.weight;
  kernels::cpu::refresh_float8_copy({.weight = weight.const_data_ptr(),
                                     .rows = weight.size(0),
                                     .columns = weight.size(1),
                                     .copy = copy.cast.rows.mutable_data_ptr(),
                                     .transposed = address_or_null(copy.cast.columns)});
}

using CudaEntries = std::vector<std::pair<c10::Device, kernels::cuda::Float8CopyEntry>>;

void refresh_on_cuda(const CudaEntries& entries) {
  if (entries.empty()) {
    return;
  }
  const auto& kernels = *kernels::cuda_kernels();  // There: can_have_float8_copy() has asked.
  std::vector<c10::Device> done;
  for (const auto& [device, unused] : entries) {
    if (std::ranges::find(done, device) != done.end()) {
      continue;
    }
    std::vector<kernels::cuda::Float8CopyEntry> here;
    for (const auto& [other, entry] : entries) {
      if (other == device) {
        here.push_back(entry);
      }
    }
    kernels.refresh_float8_copies(here, device);
    done.push_back(device);
  }
}

}  // namespace

bool can_have_float8_copy(const at::Tensor& weight) {
  return has_kernels(weight.device().type()) && is_ordinary(weight) && !is_intercepted() &&
         weight.dim() == 2 && weight.scalar_type() == c10::kFloat && weight.is_contiguous() &&
         weight.numel() != 0 && weight.size(0) % kCopyAlignment == 0 &&
         weight.size(1) % kCopyAlignment == 0;
}

Float8Cast make_float8_copy(const at::Tensor& weight, bool columns) {
  Float8Cast cast = cast_to_float8(weight, c10::kFloat8_e4m3fn, {.rows = true, .columns = columns});
  const at::Tensor bytes =
      at::zeros({kHeaderBytes + weight.numel()}, weight.options().dtype(c10::kByte));
  const at::Tensor rows =
      over(bytes, c10::kFloat8_e4m3fn, kHeaderBytes, weight.sizes(), weight.strides());
  const at::Tensor inverse_scale = over(bytes, c10::kFloat, 0, {}, {});
  rows.copy_(cast.rows);
  inverse_scale.copy_(cast.inverse_scale);
  cast.rows = rows;
  cast.inverse_scale = inverse_scale;
  return cast;
}

bool is_float8_copy(const Float8Cast& cast) {
  return cast.rows.defined() && cast.rows.storage_offset() == kHeaderBytes &&
         cast.rows.is_alias_of(cast.inverse_scale);
}

bool is_unshared_float8_copy(const Float8Cast& cast) {
  constexpr std::size_t kOwners = 2;  // Rows and scale.
  return cast.rows.storage().use_count() == kOwners && cast.rows.use_count() == 1 &&
         cast.inverse_scale.use_count() == 1 &&
         (!cast.columns.defined() ||
          (cast.columns.use_count() == 1 && cast.columns.storage().use_count() == 1));
}

void refresh_float8_copies(const std::vector<SteppedFloat8Copy>& copies) {
  CudaEntries on_cuda;
  for (const auto& copy : copies) {
    const at::Tensor& weight = *copy.weight;
    if (weight.is_cpu()) {
      refresh_on_cpu(copy);
      continue;
    }
    on_cuda.emplace_back(weight.device(), kernels::cuda::Float8CopyEntry{
                                              .weight = weight.const_data_ptr(),
                                              .rows = weight.size(0),
                                              .columns = weight.size(1),
                                              .copy = copy.cast.rows.mutable_data_ptr(),
                                              .transposed = address_or_null(copy.cast.columns)});
  }
  refresh_on_cuda(on_cuda);
}

}  // namespace fastamp::autocast
