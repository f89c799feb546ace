// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fastamp::scaler {

/// Where the passes over one set of gradients on one device count inf and NaN.
struct NonFiniteCounts {
  c10::Device device;
  std::vector<std::uint32_t> positions;  ///< Position among the parameters of each row.
  at::Tensor counts;  ///< int64 [rows, 2]: inf and NaN at the last overflow; 0 before the first.
};

/// What the passes of one optimizer write to, kept from pass to pass.
///
/// Counters: the operators write counters only at an overflow, so they tell of the last one as long
/// as they are not given to another set of gradients: there is one buffer for each set met
/// (parameters of which some have no gradient now and then), for the few sets met last. Not
/// thread-safe.
class FASTAMP_API PassBuffers {
 public:
  /// Returns the counters for gradients of these parameters, new ones if they are met first.
  std::shared_ptr<const NonFiniteCounts> counts_for(c10::Device device,
                                                    const std::vector<std::uint32_t>& positions);

  /// Returns 1 / scale, and a place for a sum of squares on inv_scale's device. In ordinary host
  /// memory those of the pass before are used again, unless somebody still holds them.
  at::Tensor inverse_of(const at::Tensor& scale);
  at::Tensor sum_beside(const at::Tensor& inv_scale);

 private:
  at::Tensor inverse_;
  at::Tensor sum_;
  std::vector<std::shared_ptr<const NonFiniteCounts>> entries_;  // the one used last in front
};

}  // namespace fastamp::scaler
