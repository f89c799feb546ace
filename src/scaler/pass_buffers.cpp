// SPDX-License-Identifier: Apache-2.0
#include "scaler/pass_buffers.h"

#include "scaler/scale_ops.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace fastamp::scaler {
namespace {

// Programs alternate between a few sets; one that draws a new set each step must not pile them up.
constexpr std::size_t kSets = 8;

bool is_free(const at::Tensor& tensor) { return tensor.defined() && tensor.use_count() == 1; }

}  // namespace

std::shared_ptr<const NonFiniteCounts> PassBuffers::counts_for(
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
  auto made = std::make_shared<const NonFiniteCounts>(
      NonFiniteCounts{device, positions, std::move(counts)});
  entries_.insert(entries_.begin(), made);
  if (entries_.size() > kSets) {
    entries_.pop_back();
  }
  return made;
}

at::Tensor PassBuffers::inverse_of(const at::Tensor& scale) {
  if (!is_plain_cpu_scalar(scale, at::kFloat)) {
    return inverse_scale(scale);
  }
  if (is_free(inverse_)) {
    write_inverse(*scale.const_data_ptr<float>(), inverse_);
  } else {
    inverse_ = inverse_scale(scale);
  }
  return inverse_;
}

at::Tensor PassBuffers::sum_beside(const at::Tensor& inv_scale) {
  if (!is_plain_cpu_scalar(inv_scale, at::kFloat)) {
    return new_scalar(inv_scale, at::kDouble);
  }
  if (!is_free(sum_)) {
    sum_ = new_scalar(inv_scale, at::kDouble);
  }
  return sum_;
}

}  // namespace fastamp::scaler
