// SPDX-License-Identifier: Apache-2.0
// Every element of every tensor is covered exactly once, by the tables and the cursor that the
// CUDA kernels use; how many launches a list takes.

#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/launch_table.h"
#include "support/catch.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

using namespace fastamp::kernels::cuda;

namespace {

constexpr DeviceShape kH200{132, 8, false};
constexpr DeviceShape kCapturing{132, 8, true};

std::vector<TensorEntry<1>> entries_of(const std::vector<std::int64_t>& numels) {
  std::vector<TensorEntry<1>> entries;
  for (std::size_t i = 0; i < numels.size(); ++i) {
    // Addresses are only carried, never read: any distinct value will do.
    entries.push_back(
        {{reinterpret_cast<void*>(i * 64 + 8)}, numels[i], static_cast<std::uint16_t>(i * 997)});
  }
  return entries;
}

constexpr OpShape kPlain{kFineChunkNumel, 0, false};
constexpr OpShape kSums{kSumChunkNumel, kMaxSumRuns, true};
constexpr OpShape kCounts{kFineChunkNumel, 0, true};

/// Walks a table as the kernel does, all workers in turn, and checks order, bounds and contents.
/// Returns the ranges of each run.
template <std::int64_t kChunkNumel, typename Table>
std::vector<std::vector<ChunkRange>> check_covers(const Table& table,
                                                  const std::vector<TensorEntry<1>>& entries,
                                                  const LaunchPlan& plan) {
  const std::uint32_t workers = plan.blocks * kBlockWarps;
  std::vector<std::vector<ChunkRange>> runs(plan.runs);
  std::vector<std::int64_t> covered(entries.size(), 0);
  std::uint32_t next_run = 0;
  for (std::uint32_t worker = 0; worker < workers; ++worker) {
    const auto stop = part_begin(plan.runs, worker + 1, workers);
    for (auto run = part_begin(plan.runs, worker, workers); run < stop; ++run) {
      REQUIRE(run == next_run++);  // each of them once
      const auto first = part_begin(plan.chunks, run, plan.runs);
      const auto last = part_begin(plan.chunks, run + 1, plan.runs);
      if (first == last) {
        continue;
      }
      ChunkCursor<kChunkNumel, Table> cursor(table, first, last);
      ChunkRange range{};
      while (cursor.next(range)) {
        const auto i = static_cast<std::size_t>(range.entry);
        REQUIRE(i < entries.size());
        REQUIRE(range.begin == covered[i]);  // in order, no gap, no overlap
        REQUIRE(range.end > range.begin);
        REQUIRE(range.end <= entries[i].numel);
        REQUIRE((range.end % kChunkNumel == 0 || range.end == entries[i].numel));
        REQUIRE(table.pointer(0, range.entry) == entries[i].pointers[0]);
        REQUIRE(packed_tag(table.packed[range.entry]) == entries[i].tag);
        covered[i] = range.end;
        runs[run].push_back(range);
      }
    }
  }
  REQUIRE(next_run == plan.runs);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    REQUIRE(covered[i] == entries[i].numel);
  }
  return runs;
}

template <std::int64_t kChunkNumel>
std::vector<std::vector<ChunkRange>> check_plan_of(const std::vector<std::int64_t>& numels,
                                                   const DeviceShape& device, const OpShape& op) {
  const auto all = entries_of(numels);
  const auto plan = plan_launch(numels, kTableCapacity<1>, op, device);
  REQUIRE(plan.blocks >= 1);
  REQUIRE(plan.blocks <= static_cast<unsigned>(device.processors * device.blocks_per_processor));
  REQUIRE(plan.launches() == 1 + plan.uploads);
  if (plan.home == TableHome::kDevice) {
    const auto bytes = device_table_bytes(all.size(), kEntryBytes<1>);
    REQUIRE(plan.uploads == (device.capturing ? upload_count(bytes, device.large_arguments) : 0));
    std::vector<std::uint64_t> buffer((bytes + 7) / 8);
    fill_device_table<kChunkNumel, 1>(buffer.data(), all);
    return check_covers<kChunkNumel>(view_device_table<1>(buffer.data(), all.size()), all, plan);
  }
  REQUIRE(plan.uploads == 0);
  if (plan.home == TableHome::kLargeArgs) {
    const auto table = std::make_unique<ArgTable<1, kLargeTableBytes>>();
    fill_table<kChunkNumel, 1, kLargeTableBytes>(*table, all);
    return check_covers<kChunkNumel>(*table, all, plan);
  }
  ArgTable<1, kSmallTableBytes> table;
  fill_table<kChunkNumel, 1, kSmallTableBytes>(table, all);
  return check_covers<kChunkNumel>(table, all, plan);
}

std::vector<std::vector<ChunkRange>> check_plan(const std::vector<std::int64_t>& numels,
                                                const DeviceShape& device,
                                                const OpShape& op = kPlain) {
  return op.chunk_numel == kSumChunkNumel ? check_plan_of<kSumChunkNumel>(numels, device, op)
                                          : check_plan_of<kFineChunkNumel>(numels, device, op);
}

}  // namespace

TEST_CASE("plan: a check and a step are two launches for any number of tensors", "[kernels]") {
  // The check has two lists (gradient, counts); Adam's step seven.
  for (const std::size_t count : {std::size_t{1}, std::size_t{10}, std::size_t{1000},
                                  std::size_t{10000}, std::size_t{100000}}) {
    CAPTURE(count);
    for (const std::int64_t numel : {16, 5000}) {
      const std::vector<std::int64_t> numels(count, numel);
      const auto check = plan_launch(numels, kTableCapacity<2>, kSums, kH200);
      const auto step = plan_launch(numels, kTableCapacity<7>, kCounts, kH200);
      CHECK(check.launches() + step.launches() == 2);
    }
  }
}

TEST_CASE("plan: any count from 1 to 100 000 is covered by one launch", "[kernels]") {
  const auto small = kTableCapacity<1>.small;
  const auto large = kTableCapacity<1>.large;
  for (const std::size_t count :
       {std::size_t{1}, small, small + 1, large, large + 1, std::size_t{100000}}) {
    CAPTURE(count);
    check_plan(std::vector<std::int64_t>(count, 33), kH200);
    check_plan(std::vector<std::int64_t>(count, 33), kH200, kSums);
  }
}

TEST_CASE("plan: an empty list launches only what has to finish", "[kernels]") {
  for (const auto& device : {kH200, kCapturing}) {
    CHECK(plan_launch({}, kTableCapacity<1>, kPlain, device).launches() == 0);
    CHECK(plan_launch({}, kTableCapacity<1>, kSums, device).blocks == 1);
    CHECK(plan_launch({}, kTableCapacity<1>, kSums, device).runs == 0);
    // Parameters without elements, which still have step counters.
    CHECK(plan_launch({0, 0}, kTableCapacity<1>, kCounts, device).blocks == 1);
  }
}

TEST_CASE("plan: under capture kernels bring the table that arguments cannot hold", "[kernels]") {
  const auto large = kTableCapacity<1>.large;
  const auto bytes = [](std::size_t count) { return device_table_bytes(count, kEntryBytes<1>); };
  const std::vector<std::int64_t> numels(10000, 16);
  CHECK(plan_launch(numels, kTableCapacity<1>, kPlain, kCapturing).uploads ==
        (bytes(10000) + kUploadBytes - 1) / kUploadBytes);
  const DeviceShape old{132, 8, true, false};
  CHECK(plan_launch(numels, kTableCapacity<1>, kPlain, old).uploads ==
        (bytes(10000) + kSmallUploadBytes - 1) / kSmallUploadBytes);
  CHECK(plan_launch(numels, kTableCapacity<1>, kPlain, kH200).uploads == 0);
  const std::vector<std::int64_t> fitting(large, 16);
  CHECK(plan_launch(fitting, kTableCapacity<1>, kPlain, kCapturing).launches() == 1);
  check_plan(numels, kCapturing);
  check_plan(fitting, kCapturing);
}

TEST_CASE("plan: what a run holds depends on the sizes alone", "[kernels]") {
  const auto flat = [](const std::vector<std::vector<ChunkRange>>& runs) {
    std::vector<std::int64_t> words;
    for (const auto& run : runs) {
      words.push_back(-1);
      for (const auto& range : run) {
        words.insert(words.end(), {range.entry, range.begin, range.end});
      }
    }
    return words;
  };
  std::vector<std::int64_t> numels;
  for (std::int64_t i = 0; i < 5000; ++i) {
    numels.push_back(1 + (i * 7919) % (5 * kSumChunkNumel));
  }
  numels.push_back(2 * kMaxSumRuns * kSumChunkNumel);  // more chunks than runs
  const auto expected = flat(check_plan(numels, kH200, kSums));
  for (const DeviceShape device : {DeviceShape{1, 1, false}, DeviceShape{16, 6, true},
                                   DeviceShape{200, 8, false}, DeviceShape{7, 5, true}}) {
    CHECK(flat(check_plan(numels, device, kSums)) == expected);
  }
}

TEST_CASE("plan: entries without elements stand last and are never worked on", "[kernels]") {
  for (const auto& device : {kH200, kCapturing}) {
    for (const std::size_t count : {std::size_t{3}, std::size_t{500}, std::size_t{5000}}) {
      std::vector<std::int64_t> numels(count, 3000);
      numels.insert(numels.end(), count, 0);
      check_plan(numels, device, kCounts);
    }
  }
}

TEST_CASE("plan: a tensor beyond 2^31 elements", "[kernels]") {
  for (const auto& op : {kPlain, kSums}) {
    check_plan({(std::int64_t{1} << 31) + 5}, kH200, op);
    check_plan({7, (std::int64_t{5} << 31) + 1, 3}, kH200, op);
  }
}

TEST_CASE("plan: more chunks than 32 bits is refused", "[kernels]") {
  for (const auto& op : {kPlain, kSums}) {
    const auto numel = (std::int64_t{1} << 32) * op.chunk_numel;
    CHECK_THROWS_AS(plan_launch({numel}, kTableCapacity<1>, op, kH200), c10::ValueError);
  }
}

TEST_CASE("plan: sizes around the chunk", "[kernels]") {
  for (const auto& op : {kPlain, kSums}) {
    const auto chunk = op.chunk_numel;
    for (const auto numel :
         {std::int64_t{1}, chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk}) {
      CAPTURE(numel);
      check_plan({numel}, kH200, op);
      check_plan({numel, 1, numel}, kH200, op);
    }
  }
}

TEST_CASE("plan: few chunks are spread one to a block", "[kernels]") {
  for (const auto& op : {kPlain, kSums}) {
    const auto few = plan_launch({100 * op.chunk_numel}, kTableCapacity<1>, op, kH200);
    CHECK(few.blocks == 100);
    const auto full = plan_launch({100000 * op.chunk_numel}, kTableCapacity<1>, op, kH200);
    CHECK(full.blocks == 132 * 8);
  }
}

TEST_CASE("plan: an old driver gets every table in memory", "[kernels]") {
  for (const bool capturing : {false, true}) {
    const DeviceShape old{132, 8, capturing, false};
    for (const std::size_t count : {std::size_t{1}, std::size_t{1000}}) {
      const std::vector<std::int64_t> numels(count, 100);
      CHECK(plan_launch(numels, kTableCapacity<1>, kPlain, old).home == TableHome::kDevice);
      check_plan(numels, old);
    }
  }
}

TEST_CASE("plan: random lists on random devices are covered exactly once", "[kernels]") {
  std::mt19937_64 random(20261121);
  for (int round = 0; round < 200; ++round) {
    const auto count = std::size_t{1} + random() % 3000;
    std::vector<std::int64_t> numels(count);
    for (auto& numel : numels) {
      // Mostly small, some of many chunks.
      const auto limit = random() % 10 == 0 ? 20 * kSumChunkNumel : std::int64_t{300};
      numel = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
    }
    const DeviceShape device{static_cast<int>(1 + random() % 200),
                             static_cast<int>(1 + random() % 8), random() % 2 == 0};
    CAPTURE(round, count);
    check_plan(numels, device, random() % 2 == 0 ? kPlain : kSums);
  }
}

TEMPLATE_TEST_CASE_SIG("plan: tables of every depth fit the arguments and keep their pointers",
                       "[kernels]", ((std::size_t kDepth), kDepth), 1, 2, 3, 4, 5, 7, 8) {
  STATIC_REQUIRE(sizeof(ArgTable<kDepth, kLargeTableBytes>) + kOpArgBytes <= kMaxArgBytes);
  STATIC_REQUIRE(sizeof(ArgTable<kDepth, kSmallTableBytes>) <= kSmallTableBytes);
  constexpr auto count = kTableCapacity<kDepth>.small;
  std::vector<TensorEntry<kDepth>> entries(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t list = 0; list < kDepth; ++list) {
      entries[i].pointers[list] = reinterpret_cast<void*>(i * 8 + list * 65536);
    }
    entries[i].numel = static_cast<std::int64_t>(i + 1);
  }
  ArgTable<kDepth, kSmallTableBytes> args;
  fill_table<kFineChunkNumel, kDepth, kSmallTableBytes>(args, entries);
  std::vector<std::uint64_t> buffer((device_table_bytes(count, kEntryBytes<kDepth>) + 7) / 8);
  fill_device_table<kFineChunkNumel, kDepth>(buffer.data(), entries);
  const auto resident = view_device_table<kDepth>(buffer.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t list = 0; list < kDepth; ++list) {
      const auto at = static_cast<std::int32_t>(i);
      REQUIRE(args.pointer(static_cast<int>(list), at) == entries[i].pointers[list]);
      REQUIRE(resident.pointer(static_cast<int>(list), at) == entries[i].pointers[list]);
    }
  }
}
