// SPDX-License-Identifier: Apache-2.0
// CPU kernel of fastamp::norm_and_check_.
//
// Layout, mapping and order of the sums: kernels/cpu/grad_sums.h. Traffic per element: one read;
// chunks that are not finite are read again to be counted. Numerics: kernels/functors/norm.h.

#include "kernels/amp_args.h"
#include "kernels/cpu/grad_sums.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace fastamp::kernels {

void norm_and_check_cpu(const NormArgs& args) {
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto* const sum_of_chunk = cpu::chunk_sum_function();
  const float inv_scale = *args.inv_scale.const_data_ptr<float>();
  const double bound = safe_squares(inv_scale);
  cpu::NonFiniteTally tally(inv_scale, mutable_pointer<std::int64_t>(args.non_finite_counts),
                            args.grads.size());
  const cpu::GradArrays grads("norm_and_check_", args.grads, args.arrays, /*writes=*/false);
  const double sum = cpu::sum_chunks(
      grads, /*factor=*/1.0F, bound,
      [&](std::size_t i, const HostArray& grad, std::int64_t begin, std::int64_t end) {
        const double chunk = sum_of_chunk(grad.dtype, grad.data, begin, end);
        if (!is_safe(chunk, bound)) [[unlikely]] {
          // A step that reads them takes the products in fp32.
          tally.look(i, grad, begin, end, kOverflowBits<float>);
        }
        return chunk;
      });
  const bool usable = norm_results(args).write(sum, inv_scale);
  const bool non_finite = tally.found() || !usable;
  write_found_inf(args, non_finite);
  if (non_finite) {
    tally.clear();
  }
}

}  // namespace fastamp::kernels
