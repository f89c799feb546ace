#pragma once

// Which piece of which tensor goes to which warp, in plain C++: the host builds a plan and a table,
// kernels walk the table with ChunkCursor, and tests walk it the same way without a GPU.
//
// A call works on a list of entries; an entry is one tensor of each of kDepth parallel lists (the
// gradient; or the parameter, gradient and moments). Entry i is cut into ceil(numel / kChunkNumel)
// chunks, all chunks are numbered through, and worker (warp) w of W takes the contiguous chunks
// [C * w / W, C * (w + 1) / W): one binary search per warp, then only steps to the next entry.
// The entry's tag carries what differs per entry (its dtypes), so mixed dtypes share a launch.
//
// The table travels in the kernel's arguments while it fits: up to 204 entries in 4 KiB and 1624 in
// 32 KiB at depth 1. Longer ones are one buffer in device memory, refreshed by one async copy from
// pinned memory. Not under stream capture: a captured copy would read the pinned buffer at every
// replay, long after it went back to its pool. Kernel arguments are stored in the graph by value,
// so a capture takes as many argument-table launches as the list needs and owes nothing afterwards.

#include "kernels/functors/host_device.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastamp::kernels::cuda {

/// Elements per chunk: 16 (fp32) or 8 (fp16) 128-bit accesses per lane of a warp. Smaller chunks
/// balance the warps better, larger ones save little since neighbouring chunks are merged.
inline constexpr std::int64_t kChunkNumel = 2048;

inline constexpr int kWarpSize = 32;
inline constexpr int kBlockThreads = 256;
inline constexpr int kBlockWarps = kBlockThreads / kWarpSize;

/// Limit on the arguments of one launch (CUDA 12.1 and later, compute capability 7.0 and later),
/// and the part of it left for an op's own arguments.
inline constexpr std::size_t kMaxArgBytes = 32764;
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

/// Chunks of an entry; 0 only for an empty one, which must not get into a table.
constexpr std::int64_t chunk_count(std::int64_t numel) {
  return (numel + kChunkNumel - 1) / kChunkNumel;
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
template <typename Table>
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

/// First chunk of a worker; that of the next worker is where it stops.
FASTAMP_HOST_DEVICE std::uint32_t worker_begin(std::uint32_t chunks, std::uint32_t worker,
                                               std::uint32_t workers) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(chunks) * worker / workers);
}

enum class TableHome : std::uint8_t { kSmallArgs, kLargeArgs, kDevice };

/// One kernel launch over the entries [first, last).
struct Launch {
  std::size_t first;
  std::size_t last;
  std::uint32_t chunks;
  std::uint32_t blocks;
  TableHome home;
};

/// What a plan has to know about the device and the stream.
struct DeviceShape {
  int processors;            ///< Streaming multiprocessors.
  int blocks_per_processor;  ///< Blocks of kBlockThreads that one of them holds at a time.
  bool capturing;            ///< The stream is being captured into a graph.
};

/// How many entries fit the two argument tables.
struct TableCapacity {
  std::size_t small;
  std::size_t large;
};
template <std::size_t kDepth>
inline constexpr TableCapacity kTableCapacity = {ArgTable<kDepth, kSmallTableBytes>::kCapacity,
                                                 ArgTable<kDepth, kLargeTableBytes>::kCapacity};

static_assert(kTableCapacity<1>.small == 204 && kTableCapacity<1>.large == 1624);
static_assert(kTableCapacity<3>.large == 902);

/// Plans the launches for entries of the given sizes (none of them 0).
/// @throws c10::ValueError  for 2^32 chunks (8.8e12 elements) or more in one launch.
std::vector<Launch> plan_launches(const std::vector<std::int64_t>& numels, TableCapacity capacity,
                                  const DeviceShape& device);

}  // namespace fastamp::kernels::cuda
