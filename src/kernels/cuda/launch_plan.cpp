// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/launch_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace fastamp::kernels::cuda {

LaunchPlan plan_launch(const std::vector<std::int64_t>& numels, TableCapacity capacity,
                       const OpShape& op, const DeviceShape& device) {
  // Shifted, not divided: lists may have ten thousand entries.
  const auto shift =
      static_cast<unsigned>(std::countr_zero(static_cast<std::uint64_t>(op.chunk_numel)));
  std::int64_t chunks = 0;
  for (const auto numel : numels) {
    const auto rounded_up = static_cast<std::uint64_t>(numel + op.chunk_numel - 1);
    chunks += static_cast<std::int64_t>(rounded_up >> shift);
  }
  TORCH_CHECK_VALUE(std::cmp_less(chunks, std::numeric_limits<std::uint32_t>::max()),
                    "plan_launch: expected fewer than 2^32 chunks of ", op.chunk_numel,
                    " elements in one launch, got ", chunks);
  // A block for each chunk until the device is full: few chunks are better spread over all
  // processors than packed eight to a block.
  const auto room = std::int64_t{device.processors} * device.blocks_per_processor;
  LaunchPlan plan{static_cast<std::uint32_t>(chunks), 0,
                  static_cast<std::uint32_t>(std::min(chunks, room)), TableHome::kSmallArgs, 0};
  if (op.finishes) {
    plan.blocks = std::max(plan.blocks, 1U);
  }
  plan.runs = op.max_runs == 0 ? plan.blocks * static_cast<std::uint32_t>(kBlockWarps)
                               : std::min(plan.chunks, op.max_runs);
  const std::size_t count = numels.size();
  if (count > capacity.large || !device.large_arguments) {
    const auto bytes = device_table_bytes(count, capacity.entry_bytes);
    plan.home = TableHome::kDevice;
    plan.uploads = device.capturing ? upload_count(bytes, device.large_arguments) : 0;
  } else if (count > capacity.small) {
    plan.home = TableHome::kLargeArgs;
  }
  return plan;
}

}  // namespace fastamp::kernels::cuda
