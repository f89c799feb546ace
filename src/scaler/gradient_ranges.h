// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"

#include <fastamp/export.h>
#include <fastamp/ops/number_range.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace fastamp::scaler {

/// Zeros and exponents of an optimizer's gradients as they came from backward, still scaled.
///
/// Counting in each pass would make it slower by half or more (a loop of squares and products over
/// fp32 took 1.5 to 2.2 times as long with a comparison and a sum per element for zeros), so they
/// are counted now and then: at the first pass and at those of number 1, 2, 4, ... up to kInterval,
/// and then each kInterval-th. All other passes cost one comparison. Not thread-safe.
class FASTAMP_API GradientRanges {
 public:
  static constexpr std::int64_t kInterval = 1024;

  /// Whether the pass that begins now is to be counted. Of an iteration only the first one is: a
  /// later one may see gradients that are unscaled or clipped.
  bool take_turn() {
    if (passed_) {
      return false;
    }
    passed_ = true;
    return is_due(passes_++);
  }
  void start_iteration() { passed_ = false; }

  /// Says which iteration the next counts are of; they replace those of an earlier one.
  void start(std::int64_t step) { starting_ = step; }
  /// Counts the gradients of one device. Those in fp64, with duplicates still to be added, of
  /// foreign kinds or while something watches operators are not counted; nor is a stream that is
  /// being captured.
  void count(const DeviceGradients& gradients, const at::Tensor& inv_scale);
  /// Says what the gradients still carried where the pass was not told: 1 / scale.
  void correct(const at::Tensor& inv_scale);

  std::int64_t step() const { return step_; }  ///< That was counted last; -1: none.
  std::int64_t order() const {
    return order_;
  }  ///< Grows from one such step to the next, anywhere.

  /// Of one gradient.
  struct Zeros {
    std::int64_t zeros = 0;
    std::int64_t elements = 0;
  };
  /// What was counted, on the host.
  struct Counts {
    double scale = 0.0;                  ///< That the gradients carried.
    std::map<std::size_t, Zeros> zeros;  ///< By the position of the parameter.
    NumberRange range;                   ///< Of all gradients together.
  };
  Counts read() const;  ///< sync: waits for the device.
  /// Where zeros were counted: int64, a tensor for each device.
  std::vector<at::Tensor> zeros() const;

 private:
  struct OnDevice {
    std::vector<std::uint32_t> positions;
    std::vector<std::int64_t> elements;
    at::Tensor zeros;      ///< int64 [gradients, 1]
    at::Tensor exponents;  ///< int64 [1, kExponentColumns]
    at::Tensor inv_scale;
  };

  static bool is_due(std::int64_t pass);

  std::vector<OnDevice> devices_;
  std::int64_t passes_ = 0;
  std::int64_t starting_ = -1;  ///< Of which nothing is counted yet.
  std::int64_t step_ = -1;
  std::int64_t order_ = 0;
  bool passed_ = false;  ///< There was a pass in this iteration.
};

}  // namespace fastamp::scaler
