#include "kernels/cuda/launch_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fastamp::kernels::cuda {
namespace {

Launch plan_one(const std::vector<std::int64_t>& numels, std::size_t first, std::size_t last,
                TableHome home, const DeviceShape& device) {
  std::int64_t chunks = 0;
  for (std::size_t i = first; i < last; ++i) {
    chunks += chunk_count(numels[i]);
  }
  TORCH_CHECK_VALUE(std::cmp_less(chunks, std::numeric_limits<std::uint32_t>::max()),
                    "plan_launches: expected fewer than 2^32 chunks of ", kChunkNumel,
                    " elements in one launch, got ", chunks);
  // A block for each chunk until the device is full: few chunks are better spread over all
  // processors than packed eight to a block.
  const auto room = std::int64_t{device.processors} * device.blocks_per_processor;
  return {first, last, static_cast<std::uint32_t>(chunks),
          static_cast<std::uint32_t>(std::min(chunks, room)), home};
}

}  // namespace

std::vector<Launch> plan_launches(const std::vector<std::int64_t>& numels, TableCapacity capacity,
                                  const DeviceShape& device) {
  const std::size_t count = numels.size();
  std::vector<Launch> launches;
  if (count == 0) {
    return launches;
  }
  if (count <= capacity.small) {
    launches.push_back(plan_one(numels, 0, count, TableHome::kSmallArgs, device));
  } else if (count <= capacity.large) {
    launches.push_back(plan_one(numels, 0, count, TableHome::kLargeArgs, device));
  } else if (!device.capturing) {
    launches.push_back(plan_one(numels, 0, count, TableHome::kDevice, device));
  } else {
    for (std::size_t first = 0; first < count; first += capacity.large) {
      const std::size_t last = std::min(count, first + capacity.large);
      launches.push_back(plan_one(numels, first, last, TableHome::kLargeArgs, device));
    }
  }
  return launches;
}

}  // namespace fastamp::kernels::cuda
