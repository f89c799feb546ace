// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/float8_case.h"

#include "support/catch.h"

namespace fastamp::test {
namespace {

void* pointer(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

}  // namespace

Outputs::Outputs(const Matrix& matrix, Wanted wanted) : inverse_scale(guarded(1, at::kFloat)) {
  const auto padded = (matrix.rows + 15) / 16 * 16;
  if (wanted.rows) {
    row_major = guarded(matrix.rows * matrix.columns, at::kByte);
  }
  if (wanted.columns) {
    transposed = guarded(matrix.columns * padded, at::kByte);
  }
  if (wanted.sums) {
    sums = guarded(matrix.columns, at::kFloat);
  }
}

std::vector<at::Tensor> Outputs::all() const {
  std::vector<at::Tensor> found;
  for (const auto& output : {row_major, transposed, sums, inverse_scale}) {
    if (output.defined()) {
      found.push_back(output);
    }
  }
  return found;
}

Outputs cast_on_cpu(const Matrix& matrix, Wanted wanted) {
  namespace cpu = kernels::cpu;
  Outputs out(matrix, wanted);
  const auto from = matrix.in.scalar_type();
  const void* in = matrix.in.const_data_ptr();
  const auto range = cpu::float8_range(in, from, matrix.in.numel());
  *out.inverse_scale.mutable_data_ptr<float>() = cpu::float8_cast({
      .in = in,
      .from = from,
      .to = matrix.to,
      .rows = matrix.rows,
      .columns = matrix.columns,
      .range = range,
      .exponent = cpu::float8_exponent_for(range, matrix.to),
      .row_major = pointer(out.row_major),
      .transposed = pointer(out.transposed),
      .padded_rows = (matrix.rows + 15) / 16 * 16,
      .column_sums = static_cast<float*>(pointer(out.sums)),
  });
  return out;
}

kernels::cuda::Float8CastEntry entry_of(const Matrix& matrix, const Outputs& out) {
  return {
      .in = matrix.in.const_data_ptr(),
      .from = matrix.in.scalar_type(),
      .to = matrix.to,
      .rows = matrix.rows,
      .columns = matrix.columns,
      .row_major = pointer(out.row_major),
      .transposed = pointer(out.transposed),
      .column_sums = static_cast<float*>(pointer(out.sums)),
      .inverse_scale = out.inverse_scale.mutable_data_ptr<float>(),
  };
}

void check_outputs(const Outputs& on_cuda, const Outputs& expected) {
  const auto got = on_cuda.all();
  const auto wanted = expected.all();
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(same_bits(got[i], wanted[i]));
  }
}

}  // namespace fastamp::test
