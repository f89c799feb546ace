// SPDX-License-Identifier: Apache-2.0
#include "core/interception.h"
#include "support/catch.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>

namespace {

using c10::DispatchKey;
using fastamp::detail::kInterceptors;

}  // namespace

TEST_CASE("interceptors: whoever wraps or transforms ops is one", "[core]") {
  for (const auto key :
       {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
        DispatchKey::PreDispatch, DispatchKey::Tracer, DispatchKey::Functionalize,
        DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
        DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched,
        DispatchKey::FuncTorchVmapMode, DispatchKey::Batched, DispatchKey::VmapMode,
        DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
        DispatchKey::DeferredInit}) {
    INFO(c10::toString(key));
    CHECK(kInterceptors.has(key));
  }
}

TEST_CASE("interceptors: kinds of memory, autograd and autocast are none", "[core]") {
  const auto passed = c10::DispatchKeySet(
      {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::Meta, DispatchKey::QuantizedCPU,
       DispatchKey::SparseCPU, DispatchKey::SparseCsrCUDA, DispatchKey::MkldnnCPU,
       DispatchKey::NestedTensorCPU, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
       DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  CHECK_FALSE(passed.has_any(kInterceptors));
  CHECK_FALSE(fastamp::named_key().has_any(kInterceptors));
  CHECK_FALSE(c10::default_included_set.has_any(kInterceptors));
}

TEST_CASE("intercepts_ops: tensors that are still to be conjugated or negated do", "[core]") {
  const auto real = at::ones({2}).requires_grad_();
  const auto complex = at::complex(at::ones({2}), at::ones({2}));
  CHECK_FALSE(fastamp::intercepts_ops(real));
  CHECK_FALSE(fastamp::intercepts_ops(complex));
  CHECK(fastamp::intercepts_ops(complex.conj()));
  CHECK(fastamp::intercepts_ops(at::imag(complex.conj())));
}
