// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace fastamp {

/// Result of convert() for one parameter.
struct ConvertedParameter {
  std::string name;     ///< As in named_parameters(); of a shared one, the first of its names.
  bool is_converted;    ///< Whether it has the lower-precision dtype now.
  std::string reason;   ///< Why not: the op that reads it in float32, "not used", its dtype, or
                        ///< the type of a module that convert() does not know; else empty.
  std::uint64_t numel;  ///< Number of its elements.
};

/// Result of convert(); `<<` prints it for people.
struct Conversion {
  c10::ScalarType dtype;                       ///< Of the converted parameters.
  std::vector<ConvertedParameter> parameters;  ///< In the order of named_parameters().
  std::uint64_t bytes_before;                  ///< Size of all parameters before.
  std::uint64_t bytes_after;                   ///< Size of all parameters now.
};

FASTAMP_API std::ostream& operator<<(std::ostream& out, const Conversion& conversion);

/// Casts the parameters that only ops of policy `lower` use to a region's dtype, once and in place,
/// and drops their float32 values. Run the module in a region of that dtype, as before: its outputs
/// are, bit for bit, those that the region gave over the float32 module, and no weight is cast.
///
/// @code
///   const fastamp::OpPolicyGuard lists(fastamp::policy_preset(torch::kCUDA, torch::kCPU));
///   fastamp::convert(*model, torch::kBFloat16, [&] { model->forward(x); });
///   const fastamp::AutocastGuard region(torch::kCPU, torch::kBFloat16);
///   auto y = model->forward(x);
/// @endcode
///
/// Parameters stay the same tensors, shared ones included. Tensors that only have the memory of a
/// converted parameter, such as casts of another module's, keep the old values.
///
/// @param module   Its parameters are converted; all on one device, CPU or CUDA.
/// @param dtype    c10::kHalf or c10::kBFloat16.
/// @param forward  Runs the module; called once, on this thread, in a region of `dtype` without
///     gradients, under the op policies in force here. Uses by other threads are not seen. Without
///     it, types decide: parameters of LibTorch's convolutions and weights of its Linear are
///     converted if the policy of their op is `lower`, and no other module has them.
/// @return What was done, parameter by parameter.
/// @throws c10::ValueError for another dtype, parameters on several devices or on another one, or
///     a module without parameters. What `forward` throws passes through. Nothing is changed then.
/// @note Not thread-safe: the module may not be used meanwhile.
FASTAMP_API Conversion convert(torch::nn::Module& module, c10::ScalarType dtype,
                               const std::function<void()>& forward = nullptr);

}  // namespace fastamp
