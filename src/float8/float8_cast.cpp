// SPDX-License-Identifier: Apache-2.0
#include "float8/float8_cast.h"

#include "core/interception.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "kernels/cpu/float8.h"
#include "kernels/cuda_kernels.h"
#include "kernels/functors/float8.h"
#include "kernels/functors/float8_copy.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/amax_ops.h>
#include <ATen/ops/bitwise_left_shift_ops.h>
#include <ATen/ops/bitwise_right_shift_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite_ops.h>
#include <ATen/ops/scalar_tensor_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace fastamp::autocast {
namespace {

using kernels::Float8Format;

constexpr std::int64_t kAlignment = 16;

template <class Int>
Int padded(const Int& rows) {
  return (rows + (kAlignment - 1)) / kAlignment * kAlignment;
}

at::Tensor empty_on(c10::Device device, at::IntArrayRef sizes, c10::ScalarType dtype) {
  return device.is_cpu() ? at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, std::nullopt)
                         : at::empty(sizes, at::TensorOptions(device).dtype(dtype));
}

/// Whether a matrix lies column by column, so that its transpose can be read in its place.
bool is_column_major(const at::Tensor& matrix) {
  return !matrix.is_contiguous() && matrix.t().is_contiguous();
}

void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

/// Memory for the cast of a matrix.
Float8Cast allocate(const at::Tensor& matrix, c10::ScalarType to, Float8Wanted wanted) {
  const auto rows = matrix.size(0);
  const auto columns = matrix.size(1);
  const auto device = matrix.device();
  Float8Cast out;
  if (wanted.rows) {
    out.rows = empty_on(device, {rows, columns}, to);
  }
  if (wanted.columns) {
    out.columns = empty_on(device, {columns, padded(rows)}, to);
  }
  if (wanted.column_sums) {
    out.column_sums = empty_on(device, {columns}, c10::kFloat);
  }
  out.inverse_scale = empty_on(device, {}, c10::kFloat);
  return out;
}

/// @param amax  Of the tensor that this is a part of; null if it is no part.
Float8Cast cast_on_cpu(const at::Tensor& given, c10::ScalarType to, Float8Wanted wanted,
                       const float* amax = nullptr) {
  const auto matrix = given.expect_contiguous();
  const auto rows = matrix->size(0);
  Float8Cast out = allocate(*matrix, to, wanted);
  const void* in = matrix->const_data_ptr();
  const auto from = matrix->scalar_type();
  auto range = kernels::cpu::float8_range(in, from, matrix->numel());
  if (amax != nullptr) {
    range.amax = std::bit_cast<std::uint32_t>(*amax);
  }
  const float inverse = kernels::cpu::float8_cast({
      .in = in,
      .from = from,
      .to = to,
      .rows = rows,
      .columns = matrix->size(1),
      .range = range,
      .exponent = kernels::cpu::float8_exponent_for(range, to),
      .row_major = data_or_null(out.rows),
      .transposed = data_or_null(out.columns),
      .padded_rows = padded(rows),
      .column_sums = static_cast<float*>(data_or_null(out.column_sums)),
  });
  *out.inverse_scale.mutable_data_ptr<float>() = inverse;
  return out;
}

/// Whether both layouts of the cast are those of the transpose, which lies row by row, exchanged:
/// neither has padding, so nothing is copied first.
bool is_read_transposed(const at::Tensor& matrix, Float8Wanted wanted) {
  return is_column_major(matrix) && matrix.size(0) % kAlignment == 0 &&
         matrix.size(1) % kAlignment == 0 && !wanted.column_sums;
}

kernels::cuda::Float8CastEntry cuda_entry(const at::Tensor& matrix, c10::ScalarType to,
                                          const Float8Cast& out) {
  return {
      .in = matrix.const_data_ptr(),
      .from = matrix.scalar_type(),
      .to = to,
      .rows = matrix.size(0),
      .columns = matrix.size(1),
      .row_major = data_or_null(out.rows),
      .transposed = data_or_null(out.columns),
      .column_sums = static_cast<float*>(data_or_null(out.column_sums)),
      .inverse_scale = out.inverse_scale.mutable_data_ptr<float>(),
  };
}

std::vector<Float8Cast> cast_all_on_cuda(const kernels::CudaKernels& kernels,
                                         const std::vector<Float8CastRequest>& requests,
                                         c10::ScalarType to) {
  std::vector<Float8Cast> casts;
  std::vector<at::Tensor> sources;  // Held until the kernels are launched.
  std::vector<kernels::cuda::Float8CastEntry> entries;
  for (const auto& [matrix, wanted] : requests) {
    const bool transposed = is_read_transposed(matrix, wanted);
    sources.push_back((transposed ? matrix.t() : matrix).contiguous());
    casts.push_back(allocate(sources.back(), to, transposed ? wanted.transposed() : wanted));
    entries.push_back(cuda_entry(sources.back(), to, casts.back()));
  }
  kernels.cast_to_float8(std::move(entries), sources.front().device());
  for (std::size_t i = 0; i < casts.size(); ++i) {
    if (is_read_transposed(requests[i].matrix, requests[i].wanted)) {
      std::swap(casts[i].rows, casts[i].columns);
    }
  }
  return casts;
}

Float8Cast cast_on_cuda(const kernels::CudaKernels& kernels, const at::Tensor& given,
                        c10::ScalarType to, Float8Wanted wanted) {
  const at::Tensor matrix = given.contiguous();
  Float8Cast out = allocate(matrix, to, wanted);
  kernels.cast_to_float8({cuda_entry(matrix, to, out)}, matrix.device());
  return out;
}

/// The exponent field of the scale, as kernels::float8_exponent, by integer arithmetic on the
/// device.
at::Tensor exponent_by_ops(const at::Tensor& amax, std::uint32_t top) {
  const at::Tensor bits = amax.to(c10::kFloat).view(c10::kInt);
  const at::Tensor exponent = at::_ops::bitwise_right_shift_Tensor_Scalar::call(bits + 0x1fffff, 23)
                                  .neg()
                                  .add(static_cast<std::int64_t>(top) + 254)
                                  .clamp_max(253);
  return at::_ops::where_ScalarSelf::call(bits == 0, 127, exponent).to(c10::kInt);
}

at::Tensor power_of_two(const at::Tensor& exponent) {
  return at::_ops::bitwise_left_shift_Tensor_Scalar::call(exponent, 23).view(c10::kFloat);
}

/// Pads with rows of zeros below, up to a multiple of 16, and `more` of them.
///
/// No tensor is made of which a tracer would have to know whether it is empty, as one of just the
/// missing rows: the traced program would be for such numbers of rows alone.
at::Tensor padded_by_ops(const at::Tensor& matrix, std::int64_t more = 0) {
  const c10::SymInt rows = matrix.sym_size(0);
  const auto known_rows = rows.maybe_as_int();
  if (known_rows.has_value() && padded(*known_rows) == *known_rows && more == 0) {
    return matrix;
  }
  const auto zeros =
      at::zeros_symint({kAlignment - 1 + more, matrix.sym_size(1)}, matrix.options());
  return at::_ops::cat::call({matrix, zeros}, 0).narrow_symint(0, 0, padded(rows) + more);
}

/// Sums in the order of the kernels: tiles of rows in float32, their sums in double. One tile more
/// than there are, so that there never is just one, which is another case to a tracer.
at::Tensor column_sums_by_ops(const at::Tensor& matrix) {
  const at::Tensor rows = padded_by_ops(matrix.to(c10::kFloat), kernels::kFloat8TileRows);
  const at::Tensor tiles = rows.reshape_symint(
      {rows.sym_size(0) / kernels::kFloat8TileRows, kernels::kFloat8TileRows, rows.sym_size(1)});
  at::Tensor sums = tiles.select(1, 0);
  for (std::int64_t i = 1; i < kernels::kFloat8TileRows; ++i) {
    sums = sums + tiles.select(1, i);
  }
  return sums.sum({0}, /*keepdim=*/false, c10::kDouble).to(c10::kFloat);
}

at::Tensor amax_by_ops(const at::Tensor& tensor, const at::Tensor& is_finite) {
  return at::_ops::where_ScalarOther::call(is_finite, tensor.abs(), 0).amax();
}

/// @param whole_amax  Of the tensor that this is a part of; undefined if it is no part.
Float8Cast cast_by_ops(const at::Tensor& matrix, c10::ScalarType to, Float8Wanted wanted,
                       const at::Tensor& whole_amax = {}) {
  const bool is_e4m3 = to == c10::kFloat8_e4m3fn;
  const auto top =
      is_e4m3 ? Float8Format<c10::Float8_e4m3fn>::kTop : Float8Format<c10::Float8_e5m2>::kTop;
  const at::Tensor is_finite = at::_ops::isfinite::call(matrix);
  const at::Tensor amax = whole_amax.defined() ? whole_amax : amax_by_ops(matrix, is_finite);
  const at::Tensor exponent = exponent_by_ops(amax, top);
  at::Tensor scaled = matrix.to(c10::kFloat) * power_of_two(exponent);
  if (is_e4m3) {  // Later versions of torch cast inf to the largest value.
    scaled = at::_ops::where_ScalarOther::call(is_finite, scaled,
                                               std::numeric_limits<float>::quiet_NaN());
  }
  Float8Cast out;
  out.inverse_scale = power_of_two(exponent.neg().add(254));
  if (wanted.rows) {
    out.rows = scaled.to(to).contiguous();
  }
  if (wanted.columns) {
    out.columns = padded_by_ops(scaled).to(to).t().contiguous();
  }
  if (wanted.column_sums) {
    out.column_sums = column_sums_by_ops(matrix);
  }
  return out;
}

constexpr auto kHeaderBytes = static_cast<std::int64_t>(kernels::kFloat8HeaderBytes);

/// Another tensor over the memory of `bytes`, no view of it.
at::Tensor over(const at::Tensor& bytes, c10::ScalarType dtype, std::int64_t offset,
                at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::empty({0}, bytes.options().dtype(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(bytes.storage());
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void refresh_on_cpu(const SteppedFloat8Copy& copy) {
  const at::Tensor& weight = *copy.weight;
  kernels::cpu::refresh_float8_copy({.weight = weight.const_data_ptr(),
                                     .rows = weight.size(0),
                                     .columns = weight.size(1),
                                     .copy = copy.cast.rows.mutable_data_ptr(),
                                     .transposed = data_or_null(copy.cast.columns)});
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

Float8Cast cast_to_float8_by_ops(const at::Tensor& matrix, c10::ScalarType to,
                                 Float8Wanted wanted) {
  return cast_by_ops(matrix, to, wanted);
}

at::Tensor float8_columns(const at::Tensor& rows) { return padded_by_ops(rows).t().contiguous(); }

Float8Cast cast_to_float8(const at::Tensor& matrix, c10::ScalarType to, Float8Wanted wanted) {
  if (!is_ordinary(matrix) || is_intercepted()) {  // First: its sizes may be symbols.
    return cast_to_float8_by_ops(matrix, to, wanted);
  }
  if (is_read_transposed(matrix, wanted)) {
    Float8Cast out = cast_to_float8(matrix.t(), to, wanted.transposed());
    std::swap(out.rows, out.columns);
    return out;
  }
  if (matrix.is_cpu()) {
    return cast_on_cpu(matrix, to, wanted);
  }
  const auto* const cuda = matrix.is_cuda() ? kernels::cuda_kernels() : nullptr;
  if (cuda != nullptr) {
    return cast_on_cuda(*cuda, matrix, to, wanted);
  }
  return cast_to_float8_by_ops(matrix, to, wanted);
}

at::Tensor float8_amax(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::zeros({}, tensor.options().dtype(c10::kFloat));
  }
  if (!tensor.is_cpu() || !is_ordinary(tensor) || is_intercepted()) {
    return amax_by_ops(tensor, at::_ops::isfinite::call(tensor)).to(c10::kFloat);
  }
  const auto dense = tensor.expect_contiguous();
  const auto range =
      kernels::cpu::float8_range(dense->const_data_ptr(), dense->scalar_type(), dense->numel());
  at::Tensor amax = empty_on(tensor.device(), {}, c10::kFloat);
  *amax.mutable_data_ptr<float>() = std::bit_cast<float>(range.amax);
  return amax;
}

Float8Cast cast_part_to_float8(const at::Tensor& matrix, const at::Tensor& amax, c10::ScalarType to,
                               Float8Wanted wanted) {
  const bool is_plain = matrix.is_cpu() && is_ordinary(matrix) && !is_intercepted();
  return is_plain ? cast_on_cpu(matrix, to, wanted, amax.const_data_ptr<float>())
                  : cast_by_ops(matrix, to, wanted, amax);
}

std::vector<Float8Cast> cast_all_to_float8(const std::vector<Float8CastRequest>& requests,
                                           c10::ScalarType to) {
  const bool are_on_cuda = requests.size() > 1 && !is_intercepted() &&
                           std::ranges::all_of(requests, [](const Float8CastRequest& request) {
                             return request.matrix.is_cuda() && is_ordinary(request.matrix);
                           });
  const auto* const cuda = are_on_cuda ? kernels::cuda_kernels() : nullptr;
  if (cuda != nullptr) {
    return cast_all_on_cuda(*cuda, requests, to);
  }
  std::vector<Float8Cast> casts;
  casts.reserve(requests.size());
  for (const auto& [matrix, wanted] : requests) {
    casts.push_back(cast_to_float8(matrix, to, wanted));
  }
  return casts;
}

bool can_have_float8_copy(const at::Tensor& weight) {
  return has_kernels(weight.device().type()) && is_ordinary(weight) && !is_intercepted() &&
         weight.dim() == 2 && weight.scalar_type() == c10::kFloat && weight.is_contiguous() &&
         weight.numel() != 0 && weight.size(0) % kAlignment == 0 &&
         weight.size(1) % kAlignment == 0;
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
                                              .transposed = data_or_null(copy.cast.columns)});
  }
  refresh_on_cuda(on_cuda);
}

}  // namespace fastamp::autocast
