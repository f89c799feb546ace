// SPDX-License-Identifier: Apache-2.0
#include "optim/param_state.h"

#include "kernels/functors/step_count.h"
#include "optim/starting_masters.h"

#include <fastamp/optim/stored_state.h>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace fastamp::optim {

at::Tensor zeros_for(const at::Tensor& param, at::ScalarType dtype) {
  return at::zeros_like(param, param.options().dtype(dtype).requires_grad(false),
                        at::MemoryFormat::Preserve);
}

void bring_moment(at::Tensor& moment, const at::Tensor& param, at::ScalarType dtype) {
  if (!moment.defined()) {
    moment = zeros_for(param, dtype);
  } else if (moment.scalar_type() != dtype) [[unlikely]] {
    moment = moment.to(dtype);
  }
}

at::Tensor counter_on(c10::Device device, std::int64_t steps) {
  const auto count =
      kernels::count_of(static_cast<std::uint64_t>(std::max<std::int64_t>(steps, 0)));
  return at::full({}, count, at::TensorOptions(at::kFloat).device(device));
}

std::int64_t read_counter(const at::Tensor& counter) {
  return counter.defined() ? kernels::steps_of(counter.item<float>())
                           : 0;  // sync: checkpoints only
}

at::Tensor master_of(const at::Tensor& param) {
  const auto starting = kept_starting_master(param);
  return starting.defined() ? starting : param.detach().to(at::kFloat);
}

at::Tensor remainder_of(const at::Tensor& param) {
  const auto starting = kept_starting_master(param);
  return starting.defined() ? remainder_from_master(param, starting) : zeros_for(param, at::kShort);
}

void write_tensor(torch::serialize::OutputArchive& archive, const std::string& key,
                  const at::Tensor& tensor) {
  if (tensor.defined()) {
    archive.write(key, c10::IValue(tensor));  // An IValue, as LibTorch's optimizers write theirs.
  }
}

at::Tensor read_tensor(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? value.toTensor() : at::Tensor();
}

std::optional<std::int64_t> read_int(torch::serialize::InputArchive& archive,
                                     const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<std::int64_t>(value.toInt()) : std::nullopt;
}

}  // namespace fastamp::optim
