// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which piece of which tensor goes to which warp, in plain C++: the host builds a plan and a table,
// kernels walk the table with ChunkCursor, and tests walk it the same way without a GPU.
//
// A call works on a list of entries; an entry is one tensor of each of kDepth parallel lists (the
// gradient; or the parameter, gradient and moments). Entry i is cut into ceil(numel / chunk) chunks
// of the op's size, all C chunks are numbered consecutively and cut into R runs: run r is the
// chunks [C * r / R, C * (r + 1) / R), and worker (warp) w of W takes the runs [R * w / W, R * (w +
// 1) / W): one binary search per run, then only steps to the next entry. Where the order of a sum
// matters R is a function of C alone, so what is summed per run is the same for any launch shape;
// elsewhere R is W. The entry's tag carries what differs per entry (its dtypes), so mixed dtypes
// share the launch: there is one for any number of tensors.
//
// Balance: no worker has more than one chunk more than another, so while all wait for the last one
// less than 1 / (C / W + 1) of the time is lost: 3 % from 33 chunks per worker on.
//
// The table travels in the kernel's arguments while it fits: up to 204 entries in 4 KiB and 1624 in
// 32 KiB at depth 1. Longer ones are one buffer in device memory, refreshed by one async copy from
// pinned memory. Not under stream capture: a captured copy would read the pinned buffer at every
// replay, long after it went back to its pool. Kernel arguments are stored in the graph by value,
// so a capture writes the buffer by kernels that carry it in their arguments, 32 KiB each. Drivers
// from before CUDA 12.1 take 4 KiB of arguments, ops included: there every table is in memory.
//
// Entries without elements may stand behind all others: no worker reaches them, but work that is
// done once per entry (step counters) includes them.

#include "kernels/functors/host_device.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastamp::kernels::cuda {

/// Elements per chunk of an op that names no other size: four per lane of a warp, the least that
/// keeps lanes busy. Neighbouring chunks are merged, so larger ones would save nothing.
inline constexpr std::int64_t kFineChunkNumel = 128;
/// Elements per chunk where each run of chunks leaves a sum: 16 (fp32) or 8 (fp16) 128-bit accesses
/// per lane.
inline constexpr std::int64_t kSumChunkNumel = 2048;
/// The most runs that leave a sum. More would balance the warps of long lists better, but one block
/// adds them all, 512 KiB.
inline constexpr std::uint32_t kMaxSumRuns = 65536;

inline constexpr int kWarpSize = 32;
inline constexpr int kBlockThreads = 256;
inline constexpr int kBlockWarps = kBlockThreads / kWarpSize;

/// Limit on the arguments of one launch (CUDA 12.1 and later, compute capability 7.0 and later),
/// and the part of it left for an op's own arguments.
inline constexpr std::size_t kMaxArgBytes = 32764;
inline constexpr std::size_t kMaxArgBytesOfOldDrivers = 4096;
inline constexpr std::size_t kOpArgBytes = 256;
inline constexpr std::size_t kLargeTableBytes = kMaxArgBytes - kOpArgBytes;
/// A second, small size: the driver copies all argument bytes at each launch, used or not.
inline constexpr std::size_t kSmallTableBytes = 4096;

/// One tensor of each list: kDepth pointers to equally many elements.
template <std::size_t kDepth>
struct TensorEntry {
  std::array<void*, kDepth> pointers;
  std::int64_t numel;
  std::uint16_t tag;  ///< Meaning is the op's, for example the dtype.
};

/// Chunks of an entry; 0 only for an empty one.
constexpr std::int64_t chunk_count(std::int64_t numel, std::int64_t chunk_numel) {
  return (numel + chunk_numel - 1) / chunk_numel;
}

/// numel in the low 48 bits, tag in the high 16.
constexpr std::uint64_t pack(std::int64_t numel, std::uint16_t tag) {
  return static_cast<std::uint64_t>(numel) | (static_cast<std::uint64_t>(tag) << 48U);
}
FASTAMP_HOST_DEVICE std::int64_t packed_numel(std::uint64_t packed) {
  return static_cast<std::int64_t>(packed & ((std::uint64_t{1} << 48U) - 1));
}
FASTAMP_HOST_DEVICE std::uint16_t packed_tag(std::uint64_t packed) {
  return static_cast<std::uint16_t>(packed >> 48U);
}

/// Bytes of table per entry: pointers, packed numel and tag, first chunk.
template <std::size_t kDepth>
inline constexpr std::size_t kEntryBytes =
    (kDepth + 1) * sizeof(std::uint64_t) + sizeof(std::uint32_t);

/// A table inside the kernel's arguments.
template <std::size_t kDepth, std::size_t kBytes>
struct ArgTable {
  // 16 bytes go to the last bound, the count and the padding to 8.
  static constexpr std::size_t kCapacity = (kBytes - 16) / kEntryBytes<kDepth>;

  void* pointers[kDepth][kCapacity];
  std::uint64_t packed[kCapacity];
  std::uint32_t first_chunk[kCapacity + 1];
  std::int32_t count;

  FASTAMP_HOST_DEVICE void* pointer(int list, std::int32_t i) const { return pointers[list][i]; }
};

/// A table in device memory: four arrays in one buffer of device_table_bytes().
template <std::size_t kDepth>
struct DeviceTable {
  void* const* pointers;  ///< kDepth runs of count pointers.
  const std::uint64_t* packed;
  const std::uint32_t* first_chunk;
  std::int32_t count;

  FASTAMP_HOST_DEVICE void* pointer(int list, std::int32_t i) const {
    return pointers[static_cast<std::int64_t>(list) * count + i];
  }
};

/// A run of elements of one entry, to be worked on by one warp.
struct ChunkRange {
  std::int32_t entry;
  std::int64_t begin;
  std::int64_t end;
};

/// Walks the chunks [begin, end) of a table as element ranges, one per entry they touch.
template <std::int64_t kChunkNumel, typename Table>
class ChunkCursor {
 public:
  FASTAMP_HOST_DEVICE ChunkCursor(const Table& table, std::uint32_t begin, std::uint32_t end)
      : table_(table), at_(begin), end_(end) {
    // The last entry that starts at or before `begin`; entries have at least one chunk each.
    std::int32_t low = 0;
    std::int32_t high = table.count;
    while (high - low > 1) {
      const std::int32_t middle = low + (high - low) / 2;
      (table.first_chunk[middle] <= begin ? low : high) = middle;
    }
    entry_ = low;
  }

  /// False when all chunks were handed out.
  FASTAMP_HOST_DEVICE bool next(ChunkRange& range) {
    if (at_ >= end_) {
      return false;
    }
    const std::uint32_t first = table_.first_chunk[entry_];
    const std::uint32_t after = table_.first_chunk[entry_ + 1];
    const std::uint32_t stop = after < end_ ? after : end_;
    const std::int64_t numel = packed_numel(table_.packed[entry_]);
    range.entry = entry_;
    range.begin = static_cast<std::int64_t>(at_ - first) * kChunkNumel;
    range.end = static_cast<std::int64_t>(stop - first) * kChunkNumel;
    range.end = range.end < numel ? range.end : numel;
    at_ = stop;
    ++entry_;
    return true;
  }

 private:
  const Table& table_;
  std::uint32_t at_;
  std::uint32_t end_;
  std::int32_t entry_;
};

/// Returns where part `part` of `parts` begins; that of the next part is where it ends.
FASTAMP_HOST_DEVICE std::uint32_t part_begin(std::uint32_t total, std::uint32_t part,
                                             std::uint32_t parts) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(total) * part / parts);
}

enum class TableHome : std::uint8_t { kSmallArgs, kLargeArgs, kDevice };

/// Plan by which a list of entries is launched.
struct LaunchPlan {
  std::uint32_t chunks;
  std::uint32_t runs;
  std::uint32_t blocks;  ///< 0: there is nothing to launch.
  TableHome home;
  std::size_t uploads;  ///< Kernels that write the table, under capture only.

  std::size_t launches() const { return uploads + (blocks == 0 ? 0 : 1); }
};

/// Bytes that one upload carries, a multiple of 16, and those that it does with an old driver.
inline constexpr std::size_t kUploadBytes = kLargeTableBytes / 16 * 16;
inline constexpr std::size_t kSmallUploadBytes = kMaxArgBytesOfOldDrivers - 64;

/// Kernels that a captured upload of some bytes takes.
constexpr std::size_t upload_count(std::size_t bytes, bool large_arguments) {
  const std::size_t carried = large_arguments ? kUploadBytes : kSmallUploadBytes;
  return (bytes + carried - 1) / carried;
}

/// Facts that a plan has to know about the device and the stream.
struct DeviceShape {
  int processors;               ///< Streaming multiprocessors.
  int blocks_per_processor;     ///< Blocks of kBlockThreads that one of them holds at a time.
  bool capturing;               ///< The stream is being captured into a graph.
  bool large_arguments = true;  ///< The driver takes kMaxArgBytes.
};

/// Number of entries that fit the two argument tables, and bytes that one takes on the device.
struct TableCapacity {
  std::size_t small;
  std::size_t large;
  std::size_t entry_bytes;
};
template <std::size_t kDepth>
inline constexpr TableCapacity kTableCapacity = {ArgTable<kDepth, kSmallTableBytes>::kCapacity,
                                                 ArgTable<kDepth, kLargeTableBytes>::kCapacity,
                                                 kEntryBytes<kDepth>};

constexpr std::size_t device_table_bytes(std::size_t count, std::size_t entry_bytes) {
  return count * entry_bytes + sizeof(std::uint32_t);
}

/// Request of an op to its launch.
struct OpShape {
  std::int64_t chunk_numel;  ///< A power of two.
  std::uint32_t max_runs;    ///< 0: a run for each worker.
  bool finishes;             ///< Its last block has work even if there are no chunks.
};

static_assert(kTableCapacity<1>.small == 204 && kTableCapacity<1>.large == 1624);

/// Plans the launch for entries of the given sizes, the empty ones last.
/// @throws c10::ValueError  for 2^32 chunks (5.5e11 elements in fine ones) or more.
LaunchPlan plan_launch(const std::vector<std::int64_t>& numels, TableCapacity capacity,
                       const OpShape& op, const DeviceShape& device);

}  // namespace fastamp::kernels::cuda
