// SPDX-License-Identifier: Apache-2.0
// How evenly a launch shares out a list: all warps of a device start together, so the time is that
// of the warp with the most elements, and what the others have less of is lost.

#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/launch_table.h"
#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

using namespace fastamp::kernels::cuda;

namespace {

constexpr OpShape kFine{kFineChunkNumel, 0, false};
constexpr OpShape kSums{kSumChunkNumel, kMaxSumRuns, true};
constexpr int kProcessors[] = {108, 114, 132, 148};
constexpr int kThreads[] = {768, 1024, 1536, 2048};  // AdamW; SGD; cast and norm; unscale

DeviceShape device_of(int processors, int threads) {
  return {processors, threads / kBlockThreads, false};
}
std::int64_t warps(const DeviceShape& device) {
  return std::int64_t{device.processors} * device.blocks_per_processor * kBlockWarps;
}

/// Elements of the warp that has most of one tensor.
std::int64_t greatest_share(std::int64_t numel, const OpShape& op, const DeviceShape& device) {
  const auto plan = plan_launch({numel}, kTableCapacity<1>, op, device);
  const auto workers = plan.blocks * static_cast<std::uint32_t>(kBlockWarps);
  const auto start = [&](std::uint32_t worker) {
    const auto run = part_begin(plan.runs, worker, workers);
    return run == plan.runs ? numel : op.chunk_numel * part_begin(plan.chunks, run, plan.runs);
  };
  std::int64_t most = 0;
  for (std::uint32_t worker = 0; worker < workers; ++worker) {
    most = std::max(most, start(worker + 1) - start(worker));
  }
  return most;
}

/// The same of a list, cut as a kernel cuts it.
std::int64_t greatest_share(const std::vector<std::int64_t>& numels, const DeviceShape& device) {
  std::vector<TensorEntry<1>> entries;
  for (const auto numel : numels) {
    entries.push_back({{nullptr}, numel, 0});
  }
  const auto plan = plan_launch(numels, kTableCapacity<1>, kFine, device);
  std::vector<std::uint64_t> buffer(device_table_bytes(entries.size(), kEntryBytes<1>) / 8 + 1);
  fill_device_table<kFineChunkNumel, 1>(buffer.data(), entries);
  const auto table = view_device_table<1>(buffer.data(), entries.size());
  std::int64_t most = 0;
  for (std::uint32_t run = 0; run < plan.runs; ++run) {
    ChunkCursor<kFineChunkNumel, DeviceTable<1>> cursor(
        table, part_begin(plan.chunks, run, plan.runs),
        part_begin(plan.chunks, run + 1, plan.runs));
    ChunkRange range{};
    std::int64_t share = 0;
    while (cursor.next(range)) {
      share += range.end - range.begin;
    }
    most = std::max(most, share);
  }
  return most;
}

double loss(std::int64_t numel, std::int64_t most, const DeviceShape& device) {
  return 1.0 - static_cast<double>(numel) / static_cast<double>(warps(device) * most);
}

/// Between the two, evenly on a logarithmic scale.
std::int64_t random_size(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  std::uniform_real_distribution<double> exponent(std::log(static_cast<double>(least)),
                                                  std::log(static_cast<double>(most)));
  return std::clamp(static_cast<std::int64_t>(std::exp(exponent(random))), least, most);
}

}  // namespace

TEST_CASE("balance: from 33 chunks per warp on, less than 3 % is lost to the last round",
          "[kernels]") {
  std::mt19937_64 random(1);
  for (const int processors : kProcessors) {
    for (const int threads : kThreads) {
      const auto device = device_of(processors, threads);
      const auto least = 33 * kFineChunkNumel * warps(device);
      for (int i = 0; i < 40; ++i) {
        const auto numel = i == 0 ? least + 1 : random_size(random, least, std::int64_t{1} << 35);
        CAPTURE(processors, threads, numel);
        REQUIRE(loss(numel, greatest_share(numel, kFine, device), device) < 0.03);
      }
    }
  }
}

TEST_CASE("balance: below that, no warp has a chunk more than it must", "[kernels]") {
  std::mt19937_64 random(2);
  for (const int processors : kProcessors) {
    for (const int threads : kThreads) {
      const auto device = device_of(processors, threads);
      for (int i = 0; i < 40; ++i) {
        const auto numel = random_size(random, 1, 33 * kFineChunkNumel * warps(device));
        const auto chunks = chunk_count(numel, kFineChunkNumel);
        CAPTURE(processors, threads, numel);
        REQUIRE(greatest_share(numel, kFine, device) <=
                chunk_count(chunks, warps(device)) * kFineChunkNumel);
      }
    }
  }
}

TEST_CASE("balance: lists of tensors of all sizes lose no more", "[kernels]") {
  std::mt19937_64 random(3);
  for (const int processors : kProcessors) {
    for (const int threads : kThreads) {
      const auto device = device_of(processors, threads);
      const auto least = 34 * kFineChunkNumel * warps(device);
      std::vector<std::int64_t> numels;
      std::int64_t sum = 0;
      while (sum < least) {
        numels.push_back(random_size(random, 1, 10'000'000));
        sum += numels.back();
      }
      CAPTURE(processors, threads, numels.size(), sum);
      REQUIRE(loss(sum, greatest_share(numels, device), device) < 0.03);
    }
  }
}

TEST_CASE("balance: where runs leave sums, long lists lose less than 10 %", "[kernels]") {
  std::mt19937_64 random(4);
  for (const int processors : kProcessors) {
    for (const int threads : {1024, 1536}) {  // with unscaling, and without
      const auto device = device_of(processors, threads);
      const auto least = 8 * kSumChunkNumel * kMaxSumRuns;
      for (int i = 0; i < 20; ++i) {
        const auto numel = random_size(random, least, 512 * least);
        CAPTURE(processors, threads, numel);
        REQUIRE(loss(numel, greatest_share(numel, kSums, device), device) < 0.10);
      }
    }
  }
}
