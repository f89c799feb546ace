#include "scaler/pass_memory.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace fastamp::scaler {
namespace {

// Programs alternate between a few sets; one that draws a new set each step must not pile them up.
constexpr std::size_t kSets = 8;

}  // namespace

std::shared_ptr<const NonFiniteCounts> PassMemory::counts_for(
    c10::Device device, const std::vector<std::uint32_t>& positions) {
  const auto found = std::ranges::find_if(entries_, [&](const auto& entry) {
    return entry->device == device && entry->positions == positions;
  });
  if (found != entries_.end()) {
    std::rotate(entries_.begin(), found, found + 1);
    return entries_.front();
  }
  const auto rows = static_cast<int64_t>(positions.size());
  auto counts = at::zeros({rows, 2}, at::TensorOptions().dtype(at::kLong).device(device));
  entries_.insert(entries_.begin(), std::make_shared<const NonFiniteCounts>(
                                        NonFiniteCounts{device, positions, std::move(counts)}));
  entries_.resize(std::min(entries_.size(), kSets));
  return entries_.front();
}

}  // namespace fastamp::scaler
