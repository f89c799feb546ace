// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/exponents.h"
#include "scaler/gradient_groups.h"

#include <fastamp/macros.h>
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
/// and then each kInterval-th. All other passes cost one comparison. Of many elements a sample is
/// counted, another one each time, so that no pass takes much longer than its neighbours: counting
/// one element takes as long as unscaling three or four. Not thread-safe.
class FASTAMP_API GradientRanges {
 public:
  static constexpr std::int64_t kInterval = 1024;
  /// So many elements are counted at least, and at least each kGreatestStride-th block of them.
  static constexpr std::int64_t kCountedNumel = 32768;
  static constexpr std::int64_t kGreatestStride = 128;

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
  /// Says what the gradients still carried where the pass did not know it: 1 / scale.
  void correct(const at::Tensor& inv_scale);

  std::int64_t step() const { return step_; }  ///< That was counted last; -1: none.
  std::int64_t order() const {
    return order_;
  }  ///< Grows from one such step to the next, anywhere.

  /// Counts of one gradient.
  struct Zeros {
    std::int64_t zeros = 0;
    std::int64_t elements = 0;  ///< That were counted.
  };
  /// Returns what was counted, on the host.
  struct Counts {
    double scale = 0.0;                  ///< That the gradients carried.
    std::map<std::size_t, Zeros> zeros;  ///< By the position of the parameter.
    NumberRange range;                   ///< Of all that was counted together.
    std::int64_t elements = 0;           ///< Of these gradients, counted or not.
  };
  Counts read() const;  ///< sync: waits for the device.

  /// Place where zeros were counted on a device.
  struct ZerosOnDevice {
    at::Tensor zeros;         ///< int64, of each gradient.
    double elements_of_each;  ///< Elements of all gradients for each that was counted.
  };
  std::vector<ZerosOnDevice> zeros() const;

 private:
  struct OnDevice {
    std::vector<std::uint32_t> positions;
    std::vector<std::int64_t> elements;  ///< Of each gradient, that were counted.
    std::int64_t counted = 0;            ///< Their sum.
    std::int64_t all = 0;                ///< The same of all elements.
    at::Tensor zeros;                    ///< int64 [gradients, 1]
    at::Tensor exponents;                ///< int64 [1, kExponentColumns]
    at::Tensor inv_scale;
  };

  static bool is_due(std::int64_t pass);

  kernels::BlockSample next_sample(std::int64_t numel) const;

  std::vector<OnDevice> devices_;
  std::int64_t passes_ = 0;
  std::int64_t starts_ = 0;     ///< How often it was counted.
  std::int64_t starting_ = -1;  ///< Of which nothing is counted yet.
  std::int64_t step_ = -1;
  std::int64_t order_ = 0;
  bool passed_ = false;  ///< There was a pass in this iteration.
};

}  // namespace fastamp::scaler
