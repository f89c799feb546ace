// SPDX-License-Identifier: Apache-2.0
#pragma once

// State of a parameter that LibTorch's optimizers do not have: the step counter on the device and
// the master weight of a 16-bit parameter.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>
#include <string>

namespace fastamp::optim {

/// Zeros of param's shape and layout.
at::Tensor zeros_for(const at::Tensor& param, at::ScalarType dtype);

/// Makes a moment of a parameter that is undefined, zeros, and converts one of another dtype.
void bring_moment(at::Tensor& moment, const at::Tensor& param, at::ScalarType dtype);

/// A counter of steps (kernels/functors/step_count.h).
at::Tensor counter_on(c10::Device device, std::int64_t steps);
inline at::Tensor counter_for(const at::Tensor& param, std::int64_t steps = 0) {
  return counter_on(param.device(), steps);
}

/// The count, read from the device; 0 for an undefined counter.
std::int64_t read_counter(const at::Tensor& counter);

/// The master weights that a 16-bit parameter starts from: its starting master, or its own values.
/// From then on the step itself updates them where something else has written the parameter. Who
/// has a place for them forgets the starting master.
at::Tensor master_of(const at::Tensor& param);
/// Returns it as a remainder.
at::Tensor remainder_of(const at::Tensor& param);

/// Writes and reads an entry that may be missing.
void write_tensor(torch::serialize::OutputArchive& archive, const std::string& key,
                  const at::Tensor& tensor);
at::Tensor read_tensor(torch::serialize::InputArchive& archive, const std::string& key);
std::optional<std::int64_t> read_int(torch::serialize::InputArchive& archive,
                                     const std::string& key);

}  // namespace fastamp::optim
