// CPU kernel of fastamp::unscale_and_check_.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: short lists and lists of small tensors are walked by the
// calling thread with nothing allocated (with 10 000 tensors of 16 elements all time is in the
// walk); others are cut by kernels/cpu/share.h and spread over at::parallel_for. Traffic per
// element: one read and, unless inv_scale is 1, one write. Numerics: kernels/functors/unscale.h;
// results do not depend on the number of threads, the cuts or the instruction set.

#include "kernels/functors/unscale.h"

#include "kernels/amp_checks.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/share.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace fastamp::kernels {
namespace {

/// Up to this many elements (about 50 us of fp32) waking other threads costs more than it saves.
constexpr std::int64_t kThreadsNumel = 262144;

/// With fewer elements per tensor than this, preparing the cuts costs what the threads would save.
constexpr std::int64_t kThreadsNumelPerTensor = 256;

/// Elements converted to fp32 at a time: 4 KiB of the stack, well inside the first cache level.
constexpr std::int64_t kBlockNumel = 1024;

/// Unscales n elements; true if one was not finite.
template <typename opmath_t>
FASTAMP_HOST_DEVICE bool unscale_loop(opmath_t* data, std::int64_t n, Unscale<opmath_t> unscale) {
  auto greatest = magnitude_bits(opmath_t{0});
  if (unscale.rewrites()) {
    for (std::int64_t i = 0; i < n; ++i) {
      const opmath_t grad = data[i];
      greatest = std::max(greatest, magnitude_bits(grad));
      data[i] = unscale(grad);
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      greatest = std::max(greatest, magnitude_bits(data[i]));
    }
  }
  return greatest >= kInfBits<opmath_t>;
}

template <typename Convert, typename scalar_t>
FASTAMP_HOST_DEVICE bool unscale_range(void* base, std::int64_t begin, std::int64_t end,
                                       float inv_scale) {
  auto* data = static_cast<scalar_t*>(base);
  if constexpr (std::is_same_v<scalar_t, float> || std::is_same_v<scalar_t, double>) {
    return unscale_loop<scalar_t>(data + begin, end - begin, {static_cast<scalar_t>(inv_scale)});
  } else {
    const Unscale<float> unscale{inv_scale};
    alignas(64) float block[kBlockNumel];
    bool non_finite = false;
    for (std::int64_t i = begin; i < end; i += kBlockNumel) {
      const auto n = std::min(kBlockNumel, end - i);
      Convert::widen(data + i, block, n);
      non_finite |= unscale_loop<float>(block, n, unscale);
      if (unscale.rewrites()) {
        Convert::narrow(block, data + i, n);
      }
    }
    return non_finite;
  }
}

template <typename Convert>
FASTAMP_HOST_DEVICE bool unscale_dispatch(at::ScalarType dtype, void* base, std::int64_t begin,
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

using UnscaleFn = bool (*)(at::ScalarType, void*, std::int64_t, std::int64_t, float);

bool unscale_baseline(at::ScalarType dtype, void* base, std::int64_t begin, std::int64_t end,
                      float inv_scale) {
  return unscale_dispatch<cpu::BaselineConvert>(dtype, base, begin, end, inv_scale);
}

#ifdef FASTAMP_X86_TARGETS
FASTAMP_TARGET_AVX2 bool unscale_avx2(at::ScalarType dtype, void* base, std::int64_t begin,
                                      std::int64_t end, float inv_scale) {
  return unscale_dispatch<cpu::Avx2Convert>(dtype, base, begin, end, inv_scale);
}

FASTAMP_TARGET_AVX512 bool unscale_avx512(at::ScalarType dtype, void* base, std::int64_t begin,
                                          std::int64_t end, float inv_scale) {
  return unscale_dispatch<cpu::Avx2Convert>(dtype, base, begin, end, inv_scale);
}
#endif

UnscaleFn unscale_function() {
  switch (cpu::best_isa()) {
#ifdef FASTAMP_X86_TARGETS
    case cpu::Isa::kAvx512:
      return unscale_avx512;
    case cpu::Isa::kAvx2:
      return unscale_avx2;
#endif
    default:
      return unscale_baseline;
  }
}

/// Stands in for a strided gradient: contiguous, and copied back if the values changed.
bool unscale_strided(const at::Tensor& grad, float inv_scale, UnscaleFn unscale) {
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor dense = grad.contiguous();
  const bool non_finite =
      unscale(dense.scalar_type(), dense.mutable_data_ptr(), 0, dense.numel(), inv_scale);
  if (Unscale<float>{inv_scale}.rewrites()) {
    grad.copy_(dense);
  }
  return non_finite;
}

/// A gradient's data is three dependent loads away (tensor, storage, data); with thousands of small
/// tensors their latency is most of the time, so it is started some tensors early.
void prefetch_ahead(at::TensorList grads, std::size_t i) {
  constexpr std::size_t kStorageAhead = 12;
  constexpr std::size_t kDataAhead = 6;
  if (i + kStorageAhead < grads.size()) {
    __builtin_prefetch(grads[i + kStorageAhead].storage().unsafeGetStorageImpl());
  }
  if (i + kDataAhead < grads.size()) {
    __builtin_prefetch(grads[i + kDataAhead].storage().unsafeGetStorageImpl()->data());
  }
}

bool unscale_whole(const at::Tensor& grad, float inv_scale, UnscaleFn unscale) {
  if (C10_LIKELY(grad.is_non_overlapping_and_dense())) {
    return unscale(grad.scalar_type(), grad.mutable_data_ptr(), 0, grad.numel(), inv_scale);
  }
  return unscale_strided(grad, inv_scale, unscale);
}

bool unscale_parallel(at::TensorList grads, float inv_scale, UnscaleFn unscale) {
  std::vector<std::int64_t> numels;
  std::vector<void*> bases;
  numels.reserve(grads.size());
  bases.reserve(grads.size());
  bool strided_non_finite = false;
  for (const auto& grad : grads) {
    const bool dense = grad.is_non_overlapping_and_dense();
    if (!dense) {
      strided_non_finite |= unscale_strided(grad, inv_scale, unscale);
    }
    numels.push_back(dense ? grad.numel() : 0);
    bases.push_back(dense ? grad.mutable_data_ptr() : nullptr);
  }
  const cpu::Line line(numels);
  std::atomic<bool> non_finite{strided_non_finite};
  at::parallel_for(0, line.length(), kThreadsNumel / 2, [&](std::int64_t begin, std::int64_t end) {
    bool mine = false;
    line.visit(begin, end, [&](std::size_t i, std::int64_t first, std::int64_t last) {
      mine |= unscale(grads[i].scalar_type(), bases[i], first, last, inv_scale);
    });
    if (mine) {
      non_finite.store(true, std::memory_order_relaxed);
    }
  });
  return non_finite.load(std::memory_order_relaxed);
}

bool unscale_serial(at::TensorList grads, float inv_scale, UnscaleFn unscale) {
  bool non_finite = false;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    prefetch_ahead(grads, i);
    non_finite |= unscale_whole(grads[i], inv_scale, unscale);
  }
  return non_finite;
}

/// Threads pay for elements, not for tensors: walking the list is serial in any case.
bool worth_threads(at::TensorList grads) {
  if (at::get_num_threads() == 1 || at::in_parallel_region()) {
    return false;
  }
  std::int64_t numel = 0;
  for (const auto& grad : grads) {
    numel += grad.numel();
  }
  const auto needed = kThreadsNumelPerTensor * static_cast<std::int64_t>(grads.size());
  return numel > std::max(kThreadsNumel, needed);
}

void unscale_and_check_cpu(at::TensorList grads, const at::Tensor& inv_scale,
                           const at::Tensor& found_inf) {
  check_unscale_args(grads, inv_scale, found_inf);
  const float factor = *inv_scale.const_data_ptr<float>();
  const auto unscale = unscale_function();
  const bool non_finite = worth_threads(grads) ? unscale_parallel(grads, factor, unscale)
                                               : unscale_serial(grads, factor, unscale);
  if (non_finite) {
    *found_inf.mutable_data_ptr<float>() = 1.0F;
  }
}

}  // namespace
}  // namespace fastamp::kernels

TORCH_LIBRARY_IMPL(fastamp, CPU, m) {
  m.impl("unscale_and_check_", fastamp::kernels::unscale_and_check_cpu);
}
