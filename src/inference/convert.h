// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/convert.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

namespace fastamp::autocast {

/// A parameter once, however many modules have it.
struct LoweredWeight {
  std::string name;
  at::Tensor tensor;
  std::string reason;   ///< Why it must stay as it is; empty if only ops of policy `lower` use it.
  int casts = 1;        ///< WeightUse's; by types, how many modules have it.
  int other_casts = 0;  ///< WeightUse's.
};

/// Looks for the parameters whose casts to a region's dtype can take their place.
/// @param function  Whom errors name.
/// @param forward   Runs the module, once; without it the types of the modules decide.
/// @return All parameters, in the order of named_parameters().
/// @throws  As convert().
std::vector<LoweredWeight> find_lowered_weights(const char* function,
                                                const torch::nn::Module& module,
                                                c10::ScalarType dtype,
                                                const std::function<void()>& forward);

/// Casts those without a reason to stay, in place, and says what became of each.
Conversion lower_weights(const std::vector<LoweredWeight>& weights, c10::ScalarType dtype);

}  // namespace fastamp::autocast
