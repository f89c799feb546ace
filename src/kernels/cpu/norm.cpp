// CPU kernel of fastamp::norm_and_check_.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: chunks of kNormChunkNumel elements; short lists and
// lists of small tensors are walked by the calling thread with nothing allocated, others spread
// over at::parallel_for, which leaves one fp64 per chunk to be added in order. Traffic per element:
// one read. Numerics: kernels/functors/norm.h; sixteen sums per chunk, added pairwise at its end,
// so the order does not depend on threads or instruction set.

#include "kernels/functors/norm.h"

#include "kernels/amp_checks.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/isa.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace fastamp::kernels {
namespace {

/// Up to this many elements waking other threads costs more than it saves.
constexpr std::int64_t kThreadsNumel = 262144;

/// Independent sums in a chunk: two AVX-512 or four AVX2 vectors hide the latency of the additions.
constexpr std::int64_t kSums = 16;

FASTAMP_HOST_DEVICE double sum_squares(const float* data, std::int64_t n) {
  double sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (std::int64_t k = 0; k < kSums; ++k) {
      sums[k] += square(data[i + k]);
    }
  }
  for (std::int64_t k = 0; i + k < n; ++k) {
    sums[k] += square(data[i + k]);
  }
  for (std::int64_t width = kSums / 2; width > 0; width /= 2) {
    for (std::int64_t k = 0; k < width; ++k) {
      sums[k] += sums[k + width];
    }
  }
  return sums[0];
}

template <typename Convert>
FASTAMP_HOST_DEVICE double chunk_dispatch(at::ScalarType dtype, const void* base,
                                          std::int64_t begin, std::int64_t end) {
  if (dtype == at::kFloat) {
    return sum_squares(static_cast<const float*>(base) + begin, end - begin);
  }
  alignas(64) float block[kNormChunkNumel];
  if (dtype == at::kHalf) {
    Convert::widen(static_cast<const c10::Half*>(base) + begin, block, end - begin);
  } else {
    Convert::widen(static_cast<const c10::BFloat16*>(base) + begin, block, end - begin);
  }
  return sum_squares(block, end - begin);
}

using ChunkFn = double (*)(at::ScalarType, const void*, std::int64_t, std::int64_t);

double chunk_baseline(at::ScalarType dtype, const void* base, std::int64_t begin,
                      std::int64_t end) {
  return chunk_dispatch<cpu::BaselineConvert>(dtype, base, begin, end);
}

#ifdef FASTAMP_X86_TARGETS
FASTAMP_TARGET_AVX2 double chunk_avx2(at::ScalarType dtype, const void* base, std::int64_t begin,
                                      std::int64_t end) {
  return chunk_dispatch<cpu::Avx2Convert>(dtype, base, begin, end);
}

FASTAMP_TARGET_AVX512 double chunk_avx512(at::ScalarType dtype, const void* base,
                                          std::int64_t begin, std::int64_t end) {
  return chunk_dispatch<cpu::Avx2Convert>(dtype, base, begin, end);
}
#endif

ChunkFn chunk_function() {
  switch (cpu::best_isa()) {
#ifdef FASTAMP_X86_TARGETS
    case cpu::Isa::kAvx512:
      return chunk_avx512;
    case cpu::Isa::kAvx2:
      return chunk_avx2;
#endif
    default:
      return chunk_baseline;
  }
}

struct Sums {
  double total = 0.0;
  float* flags;  ///< Per tensor, or null.

  void add(double chunk, std::size_t tensor) {
    total += chunk;
    if (flags != nullptr && is_non_finite(chunk)) {
      flags[tensor] = 1.0F;
    }
  }
};

using Kept = c10::MaybeOwned<at::Tensor>;

/// The gradient itself, or a contiguous copy of a strided one.
Kept dense(const at::Tensor& grad) {
  return grad.is_non_overlapping_and_dense() ? Kept::borrowed(grad)
                                             : Kept::owned(grad.contiguous());
}

void sum_serial(at::TensorList grads, Sums& sums, ChunkFn chunk) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const Kept kept = dense(grads[i]);
    const void* base = kept->const_data_ptr();
    const auto numel = kept->numel();
    for (std::int64_t at = 0; at < numel; at += kNormChunkNumel) {
      sums.add(chunk(kept->scalar_type(), base, at, std::min(at + kNormChunkNumel, numel)), i);
    }
  }
}

void sum_parallel(at::TensorList grads, Sums& sums, ChunkFn chunk) {
  std::vector<Kept> kept;
  std::vector<std::int64_t> first_chunk{0};
  kept.reserve(grads.size());
  first_chunk.reserve(grads.size() + 1);
  for (const auto& grad : grads) {
    kept.push_back(dense(grad));
    first_chunk.push_back(first_chunk.back() +
                          (grad.numel() + kNormChunkNumel - 1) / kNormChunkNumel);
  }
  std::vector<double> partial(static_cast<std::size_t>(first_chunk.back()));
  at::parallel_for(
      0, first_chunk.back(), kThreadsNumel / 2 / kNormChunkNumel,
      [&](std::int64_t begin, std::int64_t end) {
        auto i = std::ranges::upper_bound(first_chunk, begin) - first_chunk.begin() - 1;
        for (auto c = begin; c < end; ++c) {
          while (first_chunk[static_cast<std::size_t>(i) + 1] <= c) {
            ++i;
          }
          const at::Tensor& grad = *kept[static_cast<std::size_t>(i)];
          const auto at = (c - first_chunk[static_cast<std::size_t>(i)]) * kNormChunkNumel;
          partial[static_cast<std::size_t>(c)] =
              chunk(grad.scalar_type(), grad.const_data_ptr(), at,
                    std::min(at + kNormChunkNumel, grad.numel()));
        }
      });
  for (std::size_t i = 0; i < kept.size(); ++i) {
    for (auto c = first_chunk[i]; c < first_chunk[i + 1]; ++c) {
      sums.add(partial[static_cast<std::size_t>(c)], i);
    }
  }
}

bool worth_threads(at::TensorList grads) {
  if (at::get_num_threads() == 1 || at::in_parallel_region()) {
    return false;
  }
  std::int64_t numel = 0;
  for (const auto& grad : grads) {
    numel += grad.numel();
  }
  return numel > std::max(kThreadsNumel, 256 * static_cast<std::int64_t>(grads.size()));
}

void norm_and_check_cpu(at::TensorList grads, const at::Tensor& inv_scale,
                        const at::Tensor& found_inf, const at::Tensor& sum_of_squares,
                        const std::optional<at::Tensor>& per_tensor_found_inf) {
  check_norm_args(grads, inv_scale, found_inf, sum_of_squares, per_tensor_found_inf);
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool has_flags = per_tensor_found_inf && per_tensor_found_inf->defined();
  Sums sums{0.0, has_flags ? per_tensor_found_inf->mutable_data_ptr<float>() : nullptr};
  const auto chunk = chunk_function();
  worth_threads(grads) ? sum_parallel(grads, sums, chunk) : sum_serial(grads, sums, chunk);
  if (is_non_finite(sums.total)) {
    *found_inf.mutable_data_ptr<float>() = 1.0F;
  }
  *sum_of_squares.mutable_data_ptr<double>() =
      unscaled_sum_of_squares(sums.total, *inv_scale.const_data_ptr<float>());
}

}  // namespace
}  // namespace fastamp::kernels

TORCH_LIBRARY_IMPL(fastamp, CPU, m) {
  m.impl("norm_and_check_", fastamp::kernels::norm_and_check_cpu);
}
