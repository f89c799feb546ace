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

/// Walks a table as the kernel does, all workers in turn, and checks order, bounds and contents.
template <typename Table>
void check_covers(const Table& table, const std::vector<TensorEntry<1>>& entries,
                  const Launch& launch) {
  const std::uint32_t workers = launch.blocks * kBlockWarps;
  std::vector<std::int64_t> covered(entries.size(), 0);
  for (std::uint32_t worker = 0; worker < workers; ++worker) {
    ChunkCursor<Table> cursor(table, worker_begin(launch.chunks, worker, workers),
                              worker_begin(launch.chunks, worker + 1, workers));
    ChunkRange range{};
    while (worker_begin(launch.chunks, worker, workers) < launch.chunks && cursor.next(range)) {
      const auto i = static_cast<std::size_t>(range.entry);
      REQUIRE(i < entries.size());
      REQUIRE(range.begin == covered[i]);  // in order, no gap, no overlap
      REQUIRE(range.end > range.begin);
      REQUIRE(range.end <= entries[i].numel);
      REQUIRE((range.end % kChunkNumel == 0 || range.end == entries[i].numel));
      REQUIRE(table.pointer(0, range.entry) == entries[i].pointers[0]);
      REQUIRE(packed_tag(table.packed[range.entry]) == entries[i].tag);
      covered[i] = range.end;
    }
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    REQUIRE(covered[i] == entries[i].numel);
  }
}

void check_plan(const std::vector<std::int64_t>& numels, const DeviceShape& device,
                std::size_t expected_launches) {
  const auto all = entries_of(numels);
  const auto plans = plan_launches(numels, kTableCapacity<1>, device);
  REQUIRE(plans.size() == expected_launches);
  std::size_t next = 0;
  for (const auto& plan : plans) {
    REQUIRE(plan.first == next);
    REQUIRE(plan.last > plan.first);
    next = plan.last;
    REQUIRE(plan.blocks >= 1);
    REQUIRE(plan.blocks <= static_cast<unsigned>(device.processors * device.blocks_per_processor));
    const std::vector<TensorEntry<1>> part(all.begin() + static_cast<std::ptrdiff_t>(plan.first),
                                           all.begin() + static_cast<std::ptrdiff_t>(plan.last));
    if (plan.home == TableHome::kDevice) {
      std::vector<std::uint64_t> buffer((device_table_bytes<1>(part.size()) + 7) / 8);
      fill_device_table<1>(buffer.data(), part);
      check_covers(view_device_table<1>(buffer.data(), part.size()), part, plan);
    } else if (plan.home == TableHome::kLargeArgs) {
      const auto table = std::make_unique<ArgTable<1, kLargeTableBytes>>();
      fill_table<1, kLargeTableBytes>(*table, part);
      check_covers(*table, part, plan);
    } else {
      ArgTable<1, kSmallTableBytes> table;
      fill_table<1, kSmallTableBytes>(table, part);
      check_covers(table, part, plan);
    }
  }
  REQUIRE(next == numels.size());
}

}  // namespace

TEST_CASE("plan: 10 000 tensors are one launch", "[kernels]") {
  check_plan(std::vector<std::int64_t>(10000, 16), kH200, 1);
  check_plan(std::vector<std::int64_t>(10000, 5000), kH200, 1);
}

TEST_CASE("plan: any count from 1 to 100 000 is one launch", "[kernels]") {
  const auto small = kTableCapacity<1>.small;
  const auto large = kTableCapacity<1>.large;
  for (const std::size_t count :
       {std::size_t{1}, small, small + 1, large, large + 1, std::size_t{100000}}) {
    CAPTURE(count);
    check_plan(std::vector<std::int64_t>(count, 33), kH200, 1);
  }
}

TEST_CASE("plan: an empty list launches nothing", "[kernels]") {
  CHECK(plan_launches({}, kTableCapacity<1>, kH200).empty());
  CHECK(plan_launches({}, kTableCapacity<1>, kCapturing).empty());
}

TEST_CASE("plan: under capture the table never leaves the arguments", "[kernels]") {
  const auto large = kTableCapacity<1>.large;
  for (const auto& plan :
       plan_launches(std::vector<std::int64_t>(10000, 16), kTableCapacity<1>, kCapturing)) {
    CHECK(plan.home == TableHome::kLargeArgs);
  }
  check_plan(std::vector<std::int64_t>(10000, 16), kCapturing, (10000 + large - 1) / large);
  check_plan(std::vector<std::int64_t>(large, 16), kCapturing, 1);
}

TEST_CASE("plan: a tensor beyond 2^31 elements", "[kernels]") {
  check_plan({(std::int64_t{1} << 31) + 5}, kH200, 1);
  check_plan({7, (std::int64_t{5} << 31) + 1, 3}, kH200, 1);
}

TEST_CASE("plan: more chunks than 32 bits is refused", "[kernels]") {
  const auto numel = (std::int64_t{1} << 32) * kChunkNumel;
  CHECK_THROWS_AS(plan_launches({numel}, kTableCapacity<1>, kH200), c10::ValueError);
}

TEST_CASE("plan: sizes around the chunk", "[kernels]") {
  for (const auto numel : {std::int64_t{1}, kChunkNumel - 1, kChunkNumel, kChunkNumel + 1,
                           3 * kChunkNumel - 1, 3 * kChunkNumel}) {
    CAPTURE(numel);
    check_plan({numel}, kH200, 1);
    check_plan({numel, 1, numel}, kH200, 1);
  }
}

TEST_CASE("plan: few chunks are spread one to a block", "[kernels]") {
  const auto plans = plan_launches({100 * kChunkNumel}, kTableCapacity<1>, kH200);
  CHECK(plans.at(0).blocks == 100);
  const auto full = plan_launches({100000 * kChunkNumel}, kTableCapacity<1>, kH200);
  CHECK(full.at(0).blocks == 132 * 8);
}

TEST_CASE("plan: random lists on random devices are covered exactly once", "[kernels]") {
  std::mt19937_64 random(20261121);
  for (int round = 0; round < 200; ++round) {
    const auto count = std::size_t{1} + random() % 3000;
    std::vector<std::int64_t> numels(count);
    for (auto& numel : numels) {
      // Mostly small, some of many chunks.
      const auto limit = random() % 10 == 0 ? 20 * kChunkNumel : std::int64_t{300};
      numel = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
    }
    const DeviceShape device{static_cast<int>(1 + random() % 200),
                             static_cast<int>(1 + random() % 8), random() % 2 == 0};
    CAPTURE(round, count);
    const auto large = kTableCapacity<1>.large;
    check_plan(numels, device, device.capturing && count > large ? (count + large - 1) / large : 1);
  }
}

TEMPLATE_TEST_CASE_SIG("plan: tables of every depth fit the arguments and keep their pointers",
                       "[kernels]", ((std::size_t kDepth), kDepth), 1, 2, 3, 4, 5, 7) {
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
  fill_table<kDepth, kSmallTableBytes>(args, entries);
  std::vector<std::uint64_t> buffer((device_table_bytes<kDepth>(count) + 7) / 8);
  fill_device_table<kDepth>(buffer.data(), entries);
  const auto resident = view_device_table<kDepth>(buffer.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t list = 0; list < kDepth; ++list) {
      const auto at = static_cast<std::int32_t>(i);
      REQUIRE(args.pointer(static_cast<int>(list), at) == entries[i].pointers[list]);
      REQUIRE(resident.pointer(static_cast<int>(list), at) == entries[i].pointers[list]);
    }
  }
}
