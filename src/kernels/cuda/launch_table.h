// SPDX-License-Identifier: Apache-2.0
#pragma once

// Fills the tables of launch_plan.h on the host.

#include "kernels/cuda/launch_plan.h"

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace fastamp::kernels::cuda {

template <std::size_t kDepth>
using Entries = c10::ArrayRef<TensorEntry<kDepth>>;

/// The table of entries that fit it; what lies behind the last entry stays unset and unread.
template <std::int64_t kChunkNumel, std::size_t kDepth, std::size_t kBytes>
void fill_table(ArgTable<kDepth, kBytes>& table, Entries<kDepth> entries) {
  static_assert(sizeof(table) <= kBytes);
  std::uint32_t chunk = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    for (std::size_t list = 0; list < kDepth; ++list) {
      table.pointers[list][i] = entries[i].pointers[list];
    }
    table.packed[i] = pack(entries[i].numel, entries[i].tag);
    table.first_chunk[i] = chunk;
    chunk += static_cast<std::uint32_t>(chunk_count(entries[i].numel, kChunkNumel));
  }
  table.first_chunk[entries.size()] = chunk;
  table.count = static_cast<std::int32_t>(entries.size());
}

/// Addresses of the arrays of a device table whose buffer starts at `base` (8-byte aligned).
template <std::size_t kDepth>
DeviceTable<kDepth> view_device_table(const void* base, std::size_t count) {
  const auto* words = static_cast<const std::uint64_t*>(base);
  const auto* first_chunk = words + (kDepth + 1) * count;
  return {reinterpret_cast<void* const*>(words), words + kDepth * count,
          reinterpret_cast<const std::uint32_t*>(first_chunk), static_cast<std::int32_t>(count)};
}

/// Writes a device table's bytes to `base`, host memory of device_table_bytes(), 8-byte aligned.
template <std::int64_t kChunkNumel, std::size_t kDepth>
void fill_device_table(void* base, Entries<kDepth> entries) {
  const std::size_t count = entries.size();
  auto* words = static_cast<std::uint64_t*>(base);
  auto* first_chunk = reinterpret_cast<std::uint32_t*>(words + (kDepth + 1) * count);
  std::uint32_t chunk = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t list = 0; list < kDepth; ++list) {
      words[list * count + i] = reinterpret_cast<std::uint64_t>(entries[i].pointers[list]);
    }
    words[kDepth * count + i] = pack(entries[i].numel, entries[i].tag);
    first_chunk[i] = chunk;
    chunk += static_cast<std::uint32_t>(chunk_count(entries[i].numel, kChunkNumel));
  }
  first_chunk[count] = chunk;
}

}  // namespace fastamp::kernels::cuda
