// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/ops/number_range.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace fastamp {

/// The gradient of a parameter as backward leaves it.
struct GradientRange {
  std::string name;  ///< Of the parameter.
  c10::ScalarType dtype = at::kFloat;
  NumberRange range;  ///< With the loss scale in it.
};

/// Effect of a step on a parameter.
struct WeightChange {
  std::string name;
  c10::ScalarType dtype = at::kFloat;
  /// Share, from 0 to 1, of the elements with a gradient that is not 0 which kept their value: the
  /// update was below half a unit of the dtype.
  double stalled = 0.0;
  double update = 0.0;  ///< ||update|| / ||weight||; inf if the weight was 0 and moved.
};

/// Inspects a step: how large its gradients are, where its loss scale may be, what it changes.
///
/// @code
///   fastamp::Inspector inspector(model->named_parameters());
///   scaler.scale(loss).backward();
///   inspector.after_backward(scaler.get_scale());
///   scaler.step(optimizer);
///   inspector.after_step();
///   std::cout << inspector;
/// @endcode
///
/// For a step now and then: it copies all weights and gradients and waits for the device. Dtypes,
/// reasons and errors of single ops are what Python's fastamp.debug.inspect has: LibTorch offers
/// C++ no way to see each op. A Trace reports autocast's casts. Not thread-safe.
class FASTAMP_API Inspector {
 public:
  /// @param named_parameters  module->named_parameters(), or any tensors that get gradients.
  /// @throws c10::ValueError if one is undefined.
  explicit Inspector(const torch::OrderedDict<std::string, at::Tensor>& named_parameters);

  /// Notes gradients and weights. Call it after backward, before gradients are unscaled.
  /// @param scale  That the gradients carry: scaler.get_scale().
  /// @throws c10::ValueError if the scale is not a finite number above 0.
  void after_backward(double scale = 1.0);
  /// Compares the weights. Call it after the optimizer's step.
  /// @throws c10::Error before after_backward().
  void after_step();

  /// Ranges of parameters with a gradient that is strided and of float16, bfloat16 or float32.
  const std::vector<GradientRange>& gradients() const { return gradients_; }
  /// Changes of those parameters; empty before after_step().
  const std::vector<WeightChange>& weights() const { return weights_; }

  double scale() const { return scale_; }  ///< As after_backward() was given it.
  /// Share of all gradient elements that are 0, or would be in fp16 at another scale.
  /// @param other  What counts is the power of two next to its ratio to scale().
  double share_of_zeros(double other) const;
  /// The largest scale, a power of two times scale(), at which all gradients are finite in fp16; 0
  /// if they are all 0.
  double largest_scale() const;
  /// Tables of gradients and weights for people.
  std::string str() const;

 private:
  struct Noted {
    std::size_t parameter;
    at::Tensor weight;
    at::Tensor moved;  ///< bool: the gradient is not 0.
  };

  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<Noted> noted_;
  std::vector<GradientRange> gradients_;
  std::vector<WeightChange> weights_;
  NumberRange all_;
  double scale_ = 1.0;
};

FASTAMP_API std::ostream& operator<<(std::ostream& out, const Inspector& inspector);

}  // namespace fastamp
