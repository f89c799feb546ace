// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Walks over lists of gradients. With thousands of small tensors the time is in waiting for the
// cache lines of each, so the walks ask for them some tensors ahead.

namespace fastamp::scaler {

/// Appends the version of each gradient to `versions`, after bumping it if `bump` says that the
/// gradient was written. False if one has no version (inference tensors): `versions` is of no use
/// then.
bool note_versions(const std::vector<at::Tensor>& gradients, bool bump,
                   std::vector<std::uint32_t>& versions);

/// Empties the list, and then destroys what was in it: code that a gradient's end runs finds none.
void drop_gradients(std::vector<at::Tensor>& gradients);

}  // namespace fastamp::scaler
