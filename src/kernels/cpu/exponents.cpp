// SPDX-License-Identifier: Apache-2.0
// CPU kernel of fastamp::count_exponents_.
//
// Layout: each dense tensor is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: short lists are walked by the calling thread, others cut
// by kernels/cpu/work_partition.h and spread over at::parallel_for; each thread counts in 256
// numbers of its own and adds them to the table when the row changes. Traffic per counted element:
// one read. A number takes one increment by its exponent field; what shares a field (0 with
// subnormal numbers, inf with NaN) is distinguished in a second run over a block that has any.
// Numerics: counts are exact, and sums of integers do not depend on the number of threads.

#include "kernels/exponents.h"

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/grad_sums.h"
#include "kernels/cpu/squares.h"
#include "kernels/cpu/work_partition.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

namespace fastamp::kernels {
namespace {

/// Tally of one thread's part of a row.
struct ExponentTally {
  // Neighbouring numbers often have one exponent: increments of one counter wait for each other.
  static constexpr std::size_t kWays = 4;
  std::array<std::array<std::int64_t, 256>, kWays> fields{};
  std::int64_t zeros = 0;
  std::int64_t nans = 0;
  std::uint32_t greatest = 0;
  std::uint32_t least = kInfBits<float>;

  void add_to(std::int64_t* row) const {
    for (std::size_t field = 0; field < 256; ++field) {
      for (const auto& way : fields) {
        row[field] += way[field];
      }
    }
    row[0] -= zeros;
    row[kInfColumn] -= nans;
    row[kZeroColumn] += zeros;
    row[kNanColumn] += nans;
    row[kGreatestColumn] = std::max<std::int64_t>(row[kGreatestColumn], greatest);
    row[kLeastColumn] = std::max<std::int64_t>(row[kLeastColumn], kInfBits<float> - least);
  }
};

struct CountExponents {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(at::ScalarType dtype, const void* base, std::int64_t begin,
                                        std::int64_t end, ExponentTally& tally) {
    cpu::with_wide<Convert>(dtype, base, begin, end, CountExponents{&tally});
  }

  FASTAMP_ALWAYS_INLINE int operator()(const float* data, std::int64_t n) const {
    std::uint32_t greatest = 0;
    std::uint32_t least = kInfBits<float>;
    for (std::int64_t i = 0; i < n; ++i) {
      greatest = std::max(greatest, magnitude_bits(data[i]));
      least = std::min(least, magnitude_bits(data[i]));
    }
    if (least == 0 || greatest >= kInfBits<float>) {
      look_closer(data, n);
    } else {
      tally->greatest = std::max(tally->greatest, greatest);
      tally->least = std::min(tally->least, least);
    }
    count_fields(data, n);
    return 0;
  }

  /// Counts a block with numbers that share their exponent field with others: 0, inf or NaN.
  FASTAMP_ALWAYS_INLINE void look_closer(const float* data, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto bits = magnitude_bits(data[i]);
      if (bits == 0) {
        ++tally->zeros;
      } else if (bits < kInfBits<float>) {
        tally->greatest = std::max(tally->greatest, bits);
        tally->least = std::min(tally->least, bits);
      } else {
        tally->nans += bits > kInfBits<float> ? 1 : 0;
      }
    }
  }

  FASTAMP_ALWAYS_INLINE void count_fields(const float* data, std::int64_t n) const {
    auto* const a = tally->fields[0].data();
    auto* const b = tally->fields[1].data();
    auto* const c = tally->fields[2].data();
    auto* const d = tally->fields[3].data();
    std::int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      ++a[magnitude_bits(data[i]) >> 23U];
      ++b[magnitude_bits(data[i + 1]) >> 23U];
      ++c[magnitude_bits(data[i + 2]) >> 23U];
      ++d[magnitude_bits(data[i + 3]) >> 23U];
    }
    for (; i < n; ++i) {
      ++a[magnitude_bits(data[i]) >> 23U];
    }
  }
  /// Checks keep fp64 out.
  FASTAMP_ALWAYS_INLINE int operator()(const double* /*data*/, std::int64_t /*n*/) const {
    return 0;
  }

  ExponentTally* tally = nullptr;
};

/// The counts of a call, and who may write them.
class ExponentTable {
 public:
  explicit ExponentTable(const ExponentArgs& args)
      : rows_(args.exponents.mutable_data_ptr<std::int64_t>()),
        zeros_(find(args.zeros)),
        stride_(shares_row(args) ? 0 : kExponentColumns),
        sample_(args.sample()) {}

  /// Counts the elements [begin, end) of the i-th array, those of the sample.
  void count(ExponentTally& tally, std::size_t i, const HostArray& array, std::int64_t begin,
             std::int64_t end) {
    using Count = void(at::ScalarType, const void*, std::int64_t, std::int64_t, ExponentTally&);
    static auto* const best = cpu::select_target<CountExponents, Count>();
    static_assert(BlockSample::kBlockNumel == kNormChunkNumel);  // As many as best() takes.
    const auto before = tally.zeros;
    for (auto at = begin; at < end;) {
      const auto block = at / BlockSample::kBlockNumel;
      const auto stop = std::min((block + 1) * BlockSample::kBlockNumel, end);
      if (sample_.takes(static_cast<std::int64_t>(i), block)) {
        best(array.dtype, array.data, at, stop, tally);
      }
      at = stop;
    }
    if (zeros_ != nullptr && tally.zeros != before) {
      const std::scoped_lock lock(mutex_);
      zeros_[i] += tally.zeros - before;
    }
    if (stride_ != 0) {
      add(tally, i);
    }
  }

  /// Adds what a thread has counted to the row of the i-th array.
  void add(ExponentTally& tally, std::size_t i) {
    const std::scoped_lock lock(mutex_);
    tally.add_to(rows_ + static_cast<std::int64_t>(i) * stride_);
    tally = ExponentTally();
  }

 private:
  static std::int64_t* find(const std::optional<at::Tensor>& zeros) {
    return zeros && zeros->defined() ? zeros->mutable_data_ptr<std::int64_t>() : nullptr;
  }

  std::int64_t* rows_;
  std::int64_t* zeros_;
  std::int64_t stride_;
  BlockSample sample_;
  std::mutex mutex_;
};

}  // namespace

void count_exponents_cpu(const ExponentArgs& args) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const cpu::GradArrays list("count_exponents_", args.tensors, args.arrays, /*writes=*/false);
  ExponentTable table(args);
  ExponentTally mine;
  for (const auto i : list.strided()) {
    list.visit(i, [&](const HostArray& array) { table.count(mine, i, array, 0, array.numel); });
  }
  const auto arrays = list.arrays();
  std::vector<std::int64_t> numels;
  numels.reserve(arrays.size());
  for (const auto& array : arrays) {
    numels.push_back(array.data == nullptr ? 0 : array.numel);
  }
  const cpu::WorkPartition partition(numels);
  const auto walk = [&](std::int64_t begin, std::int64_t end, ExponentTally& tally) {
    partition.visit(begin, end, [&](std::size_t i, std::int64_t first, std::int64_t last) {
      table.count(tally, i, arrays[i], first, last);
    });
  };
  if (list.worth_threads()) {
    at::parallel_for(0, partition.length(), cpu::kThreadsNumel / 2,
                     [&](std::int64_t begin, std::int64_t end) {
                       ExponentTally counted;
                       walk(begin, end, counted);
                       table.add(counted, 0);
                     });
  } else {
    walk(0, partition.length(), mine);
  }
  table.add(mine, 0);  // Empty unless all tensors share a row.
}

}  // namespace fastamp::kernels
