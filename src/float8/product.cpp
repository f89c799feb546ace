// SPDX-License-Identifier: Apache-2.0
#include "float8/product.h"

#include "core/build_config.h"

#if FASTAMP_HAVE_SCALED_MM
#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_scaled_mm_ops.h>
#include <ATen/ops/mm.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Scalar.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <vector>
#else
#include <c10/util/Exception.h>
#endif

namespace fastamp::autocast {

#if FASTAMP_HAVE_SCALED_MM
namespace {

/// Whether these are numbers on a CPU and nobody looks at the calls: no fake tensors, no functions
/// that are being compiled or exported, no modes of Python's.
bool is_plain_on_cpu(const at::Tensor& tensor) {
  const auto keys = tensor.key_set() | c10::impl::tls_local_dispatch_key_set().included_;
  constexpr auto kNotPlain = c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
       c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return tensor.is_cpu() && (keys & kNotPlain).empty();
}

at::Tensor dequantized(const Float8Matrix& matrix) {
  return matrix.data.to(at::kFloat).mul_(matrix.inverse_scale);
}

/// torch's op that adds a product in fp8, an op without a promise of stability: empty if this torch
/// has none that takes these arguments. Called by a stack, so that it need not be declared here.
const std::optional<c10::OperatorHandle>& scaled_addmm() {
  static const auto found = [] {
    auto op = c10::Dispatcher::singleton().findSchema({"aten::_scaled_addmm_", ""});
    constexpr auto kWanted =
        "aten::_scaled_addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, Tensor[] scale_a, "
        "int[] recipe_a, int[] swizzle_a, Tensor[] scale_b, int[] recipe_b, int[] swizzle_b, "
        "int[] contraction_dim=[], *, Scalar beta=1, Scalar alpha=1, "
        "bool use_fast_accum=False) -> Tensor(a!)";
    return op.has_value() && c10::toString(op->schema()) == kWanted ? op : std::nullopt;
  }();
  return found;
}

/// Whether the op takes matrices of numbers, and of these dtypes, to add a product [M, N] to.
bool takes(const c10::OperatorHandle& op, const at::Tensor& sum, const Float8Matrix& a,
           const Float8Matrix& b) {
  constexpr std::uintptr_t kBytes = 16;
  const auto keys = sum.key_set() | a.data.key_set();
  const auto dtype = sum.scalar_type();
  return !keys.has(c10::DispatchKey::Python) && sum.layout() == at::kStrided &&
         op.hasKernelForDispatchKey(c10::highestPriorityBackendTypeId(keys)) &&
         !at::Context::hasROCM() &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) &&
         sum.sizes() == at::IntArrayRef({a.data.size(0), b.data.size(0)}) && sum.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(sum.const_data_ptr()) % kBytes == 0;
}

}  // namespace

at::Tensor float8_product(Float8Matrix a, Float8Matrix b, const std::optional<at::Tensor>& bias,
                          c10::ScalarType out, bool fast_accumulate) {
  if (is_plain_on_cpu(a.data)) {
    // As torch's _scaled_mm computes it, but for CPUs with AMX, where oneDNN runs its reference
    // loop instead: a thousandth of the speed. Both add products of fp8 in float32.
    auto product = at::mm(dequantized(a), dequantized(b).t());
    return (bias.has_value() ? product.add_(*bias) : product).to(out);
  }
  return at::_ops::_scaled_mm::call(a.data, b.data.t(), a.inverse_scale, b.inverse_scale, bias,
                                    /*scale_result=*/std::nullopt, out, fast_accumulate);
}

bool has_float8_sums() { return scaled_addmm().has_value(); }

bool add_float8_product(const at::Tensor& sum, Float8Matrix a, Float8Matrix b,
                        bool fast_accumulate) {
  const auto& op = scaled_addmm();
  if (!op.has_value() || is_plain_on_cpu(a.data) || !takes(*op, sum, a, b)) {
    return false;
  }
  const std::vector<int64_t> one_scale{0};  // ScalingType.TensorWise
  const std::vector<int64_t> none;
  torch::jit::Stack arguments{sum,
                              a.data,
                              b.data.t(),
                              c10::List<at::Tensor>({a.inverse_scale}),
                              one_scale,
                              none,
                              c10::List<at::Tensor>({b.inverse_scale}),
                              one_scale,
                              none,
                              none,
                              at::Scalar(1),
                              at::Scalar(1),
                              fast_accumulate};
  op->callBoxed(arguments);
  return true;
}
#else
at::Tensor float8_product(Float8Matrix /*a*/, Float8Matrix /*b*/,
                          const std::optional<at::Tensor>& /*bias*/, c10::ScalarType /*out*/,
                          bool /*fast_accumulate*/) {
  TORCH_INTERNAL_ASSERT(false, "no region has a recipe where torch has no _scaled_mm");
}

bool has_float8_sums() { return false; }

bool add_float8_product(const at::Tensor& /*sum*/, Float8Matrix /*a*/, Float8Matrix /*b*/,
                        bool /*fast_accumulate*/) {
  return false;
}
#endif

}  // namespace fastamp::autocast
