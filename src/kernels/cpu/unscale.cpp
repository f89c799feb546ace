// SPDX-License-Identifier: Apache-2.0
// CPU kernel of fastamp::unscale_and_check_.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: short lists and lists of small tensors are walked by the
// calling thread (with 10 000 tensors of 16 elements all time is in the walk, so a caller that has
// seen them already may hand the arrays over); others are cut by kernels/cpu/work_partition.h and
// spread over at::parallel_for. Traffic per element: one read and, unless inv_scale is 1, one
// write. Numerics: kernels/functors/unscale.h; results do not depend on the number of threads, the
// cuts or the target. With the norm or the counts asked for, the walk is that of
// kernels/cpu/grad_sums.h and each chunk is summed, then unscaled while the first cache level still
// holds it; a chunk whose sum does not prove that all products are finite is left for the checked
// loop, after it has been counted.

#include "kernels/functors/unscale.h"

#include "kernels/amp_args.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/grad_sums.h"
#include "kernels/cpu/squares.h"
#include "kernels/cpu/work_partition.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace fastamp::kernels {
namespace {

/// Elements converted to fp32 at a time: 4 KiB of the stack, well inside the first cache level.
constexpr std::int64_t kBlockNumel = 1024;

/// Unscales n elements that are to be stored as scalar_t; true if one of them is not finite then.
/// What is written shows what was read: no factor makes inf or NaN finite.
template <typename scalar_t, typename opmath_t>
FASTAMP_ALWAYS_INLINE bool unscale_loop(opmath_t* data, std::int64_t n, Unscale<opmath_t> unscale) {
  auto greatest = magnitude_bits(opmath_t{0});
  if (unscale.rewrites()) {
    for (std::int64_t i = 0; i < n; ++i) {
      const opmath_t product = unscale(data[i]);
      greatest = std::max(greatest, magnitude_bits(product));
      data[i] = product;
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      greatest = std::max(greatest, magnitude_bits(data[i]));
    }
  }
  return greatest >= kOverflowBits<scalar_t>;
}

template <typename Convert, typename scalar_t>
FASTAMP_ALWAYS_INLINE bool unscale_range(void* base, std::int64_t begin, std::int64_t end,
                                         float inv_scale) {
  auto* data = static_cast<scalar_t*>(base);
  if constexpr (std::is_same_v<scalar_t, float> || std::is_same_v<scalar_t, double>) {
    return unscale_loop<scalar_t, scalar_t>(data + begin, end - begin,
                                            {static_cast<scalar_t>(inv_scale)});
  } else {
    const Unscale<float> unscale{inv_scale};
    alignas(64) float block[kBlockNumel];
    bool non_finite = false;
    for (std::int64_t i = begin; i < end; i += kBlockNumel) {
      const auto n = std::min(kBlockNumel, end - i);
      Convert::widen(data + i, block, n);
      non_finite |= unscale_loop<scalar_t>(block, n, unscale);
      if (unscale.rewrites()) {
        Convert::narrow(block, data + i, n);
      }
    }
    return non_finite;
  }
}

struct UnscaleBody {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE bool run(at::ScalarType dtype, void* base, std::int64_t begin,
                                        std::int64_t end, float inv_scale) {
    switch (dtype) {
      case at::kFloat:
        return unscale_range<Convert, float>(base, begin, end, inv_scale);
      case at::kHalf:
        return unscale_range<Convert, c10::Half>(base, begin, end, inv_scale);
      case at::kBFloat16:
        return unscale_range<Convert, c10::BFloat16>(base, begin, end, inv_scale);
      default:
        return unscale_range<Convert, double>(base, begin, end, inv_scale);
    }
  }
};

/// Returns the sum of squares of one chunk, and unscales the chunk if that is safe: then all of it
/// is and stays finite, and the multiplication needs no checks.
struct SumAndUnscaleBody {
  template <typename Convert, typename Half>
  static FASTAMP_ALWAYS_INLINE double run_half(Half* data, std::int64_t n, Unscale<float> unscale,
                                               double bound) {
    alignas(64) float block[kNormChunkNumel];
    Convert::widen(data, block, n);
    const double sum = run_wide<Convert>(block, n, unscale, bound);
    if (is_safe(sum, bound) && unscale.rewrites()) {
      Convert::narrow(block, data, n);
    }
    return sum;
  }

  template <typename Convert, typename opmath_t>
  static FASTAMP_ALWAYS_INLINE double run_wide(opmath_t* data, std::int64_t n,
                                               Unscale<opmath_t> unscale, double bound) {
    const bool whole = n == kNormChunkNumel;
    const double sum = whole ? cpu::sum_squares<Convert, opmath_t, true>(data, n)
                             : cpu::sum_squares<Convert>(data, n);
    if (!is_safe(sum, bound) || !unscale.rewrites()) {
      return sum;
    }
    std::int64_t i = 0;
    if (whole) {  // Keeps memory busy: sum_squares prefetched only half of the next chunk.
      using Half = cpu::Vector<opmath_t, 32>::type;
      constexpr std::int64_t kHalfNumel = sizeof(Half) / sizeof(opmath_t);
      for (; i < n; i += 2 * kHalfNumel) {  // A cache line.
        __builtin_prefetch(data + n + (n + i) / 2);
        *reinterpret_cast<Half*>(data + i) *= unscale.inv_scale;
        *reinterpret_cast<Half*>(data + i + kHalfNumel) *= unscale.inv_scale;
      }
    }
    for (; i < n; ++i) {
      data[i] = unscale(data[i]);
    }
    return sum;
  }

  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE double run(at::ScalarType dtype, void* base, std::int64_t begin,
                                          std::int64_t end, float inv_scale, double bound) {
    const auto n = end - begin;
    switch (dtype) {
      case at::kFloat:
        return run_wide<Convert, float>(static_cast<float*>(base) + begin, n, {inv_scale}, bound);
      case at::kHalf:
        return run_half<Convert>(static_cast<c10::Half*>(base) + begin, n, {inv_scale}, bound);
      case at::kBFloat16:
        return run_half<Convert>(static_cast<c10::BFloat16*>(base) + begin, n, {inv_scale}, bound);
      default:
        return run_wide<Convert, double>(static_cast<double*>(base) + begin, n, {inv_scale}, bound);
    }
  }
};

/// Unscales the elements [begin, end) of a dense array; true if one is not finite then.
using UnscaleFn = bool(at::ScalarType, void*, std::int64_t, std::int64_t, float);

bool unscale_parallel(KnownArrays grads, float inv_scale, UnscaleFn* unscale) {
  std::vector<std::int64_t> numels;
  numels.reserve(grads.size());
  for (const auto& grad : grads) {
    numels.push_back(grad.data == nullptr ? 0 : grad.numel);
  }
  const cpu::WorkPartition partition(numels);
  std::atomic<bool> non_finite{false};
  at::parallel_for(
      0, partition.length(), cpu::kThreadsNumel / 2, [&](std::int64_t begin, std::int64_t end) {
        bool mine = false;
        partition.visit(begin, end, [&](std::size_t i, std::int64_t first, std::int64_t last) {
          mine |= unscale(grads[i].dtype, grads[i].data, first, last, inv_scale);
        });
        if (mine) {
          non_finite.store(true, std::memory_order_relaxed);
        }
      });
  return non_finite.load(std::memory_order_relaxed);
}

bool unscale_serial(KnownArrays grads, float inv_scale, UnscaleFn* unscale) {
  bool non_finite = false;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    prefetch_after(grads, i);
    if (grads[i].data != nullptr) {
      non_finite |= unscale(grads[i].dtype, grads[i].data, 0, grads[i].numel, inv_scale);
    }
  }
  return non_finite;
}

bool unscale_list(const cpu::GradArrays& grads, float inv_scale, UnscaleFn* unscale) {
  bool non_finite = false;
  for (const auto i : grads.strided()) {
    grads.visit(i, [&](const HostArray& grad) {
      non_finite |= unscale(grad.dtype, grad.data, 0, grad.numel, inv_scale);
    });
  }
  non_finite |= grads.worth_threads() ? unscale_parallel(grads.arrays(), inv_scale, unscale)
                                      : unscale_serial(grads.arrays(), inv_scale, unscale);
  return non_finite;
}

/// Does so with the sum of squares and the counts, which see each chunk before it is written.
bool unscale_and_sum(const UnscaleArgs& args, const cpu::GradArrays& grads, float inv_scale,
                     UnscaleFn* unscale) {
  using SumAndUnscale = double(at::ScalarType, void*, std::int64_t, std::int64_t, float, double);
  static auto* const sum_and_unscale = cpu::select_target<SumAndUnscaleBody, SumAndUnscale>();
  auto* const counts = mutable_pointer<std::int64_t>(args.non_finite_counts);
  cpu::NonFiniteTally tally(inv_scale, counts, args.grads.size());
  const double bound = safe_squares(inv_scale);
  const double bound_of_half = safe_squares(inv_scale, 0x1p15);
  std::atomic<bool> non_finite{false};
  const double sum = cpu::sum_chunks(
      grads, inv_scale, bound,
      [&](std::size_t i, const HostArray& grad, std::int64_t begin, std::int64_t end) {
        const double own_bound = grad.dtype == at::kHalf ? bound_of_half : bound;
        const double chunk =
            sum_and_unscale(grad.dtype, grad.data, begin, end, inv_scale, own_bound);
        if (!is_safe(chunk, own_bound)) [[unlikely]] {
          if (counts != nullptr) {
            tally.look(i, grad, begin, end, cpu::overflow_bits(grad.dtype));
          }
          if (unscale(grad.dtype, grad.data, begin, end, inv_scale)) {
            non_finite.store(true, std::memory_order_relaxed);
          }
        }
        return chunk;
      });
  norm_results(args).write(sum, inv_scale);
  return non_finite.load(std::memory_order_relaxed);
}

}  // namespace

void unscale_and_check_cpu(const UnscaleArgs& args) {
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  static auto* const unscale = cpu::select_target<UnscaleBody, UnscaleFn>();
  const float inv_scale = *args.inv_scale.const_data_ptr<float>();
  const bool writes = Unscale<float>{inv_scale}.rewrites();
  const cpu::GradArrays grads("unscale_and_check_", args.grads, args.arrays, writes);
  const bool extras = given(args.sum_of_squares) || given(args.non_finite_counts);
  const bool non_finite = extras ? unscale_and_sum(args, grads, inv_scale, unscale)
                                 : unscale_list(grads, inv_scale, unscale);
  write_found_inf(args, non_finite);
}

}  // namespace fastamp::kernels
