// SPDX-License-Identifier: Apache-2.0
// torch.optim.Muon's operators on a batch. Matrices with more rows than columns are transposed, so
// that the square products have the smaller side. Source: Keller Jordan's Muon, as torch 2.11 has
// it (torch/optim/_muon.py).

#include "optim/newton_schulz.h"

#include <ATen/ATen.h>  // wide include: seven operators
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastamp::optim {
namespace {

/// Each by itself: a reduction over a whole batch would add in another order, and so depend on what
/// else is in it.
at::Tensor norms_of(const at::Tensor& batch, double eps) {
  return at::stack(at::_foreach_norm(batch.unbind(0))).clamp_min(eps).view({-1, 1, 1});
}

at::Tensor normalized(const at::Tensor& batch, const NewtonSchulz& iteration) {
  const auto norms = norms_of(batch, iteration.eps);
  if (batch.scalar_type() == iteration.dtype) {
    return batch.div_(norms);
  }
  auto result = at::empty_like(batch, batch.options().dtype(iteration.dtype));
  return at::div_out(result, batch, norms);
}

}  // namespace

c10::ScalarType dtype_of_updates(const NewtonSchulz& iteration) {
  return iteration.dtype == c10::kHalf ? c10::kFloat : iteration.dtype;
}

at::Tensor orthogonalized(const at::Tensor& batch, const NewtonSchulz& iteration) {
  // The dtype is the caller's choice, inside a region, too.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool tall = batch.size(1) > batch.size(2);
  auto x = normalized(tall ? batch.transpose(1, 2) : batch, iteration);
  for (std::int64_t step = 0; step < iteration.steps; ++step) {
    const auto gram = at::bmm(x, x.transpose(1, 2));
    const auto polynomial = at::baddbmm(gram, gram, gram, iteration.b, iteration.c);
    x = at::baddbmm(x, polynomial, x, iteration.a);
  }
  const auto result = tall ? x.transpose(1, 2) : x;
  // As the batch lies: each matrix row by row, or column by column.
  return batch.is_contiguous() ? result.contiguous()
                               : result.transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace fastamp::optim
