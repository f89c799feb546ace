// SPDX-License-Identifier: Apache-2.0
#include "float8/product.h"

#include "core/build_config.h"

#if FASTAMP_HAVE_SCALED_MM
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_mm_ops.h>
#include <ATen/ops/mm.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
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
#else
at::Tensor float8_product(Float8Matrix /*a*/, Float8Matrix /*b*/,
                          const std::optional<at::Tensor>& /*bias*/, c10::ScalarType /*out*/,
                          bool /*fast_accumulate*/) {
  TORCH_INTERNAL_ASSERT(false, "no region has a recipe where torch has no _scaled_mm");
}
#endif

}  // namespace fastamp::autocast
