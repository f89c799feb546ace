// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/convert.h>
#include <fastamp/macros.h>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

namespace fastamp::optim {

/// Options of low_precision_weights_(); every setter returns the object.
struct LowPrecisionWeightsOptions {
  // NOLINTNEXTLINE(*-explicit-constructor): a dtype is enough, as in LibTorch's options
  LowPrecisionWeightsOptions(c10::ScalarType dtype = c10::kBFloat16) : dtype_(dtype) {}

  /// Dtype of the regions: kBFloat16 or kHalf.
  TORCH_ARG(c10::ScalarType, dtype);
  /// Names of parameters, with wildcards as for fnmatch, that stay float32.
  TORCH_ARG(std::vector<std::string>, keep);
  /// Dtype of the gradients of what is held in 16 bits: kFloat, in which they are summed exactly as
  /// those of float32 weights, or `dtype`, which takes half the memory and rounds each sum of
  /// several backward passes.
  TORCH_ARG(c10::ScalarType, grads) = c10::kFloat;
  /// Runs the module, once, as for convert(). Without it the types of the modules decide.
  TORCH_ARG(std::function<void()>, forward);
};

/// Holds the weights that only ops of policy `lower` use in 16 bits for training, where the regions
/// cast them to anyway. Their float32 values become the masters that fastamp's optimizers step,
/// made before or after: losses and masters are, bit for bit, those of float32 weights in the same
/// regions, no region casts a weight, and none is there twice.
///
/// @code
///   fastamp::optim::low_precision_weights_(*model, torch::kBFloat16);
///   fastamp::optim::AdamW optimizer(model->parameters(),
///                                   fastamp::optim::AdamWOptions(3e-4).master(
///                                       fastamp::optim::MasterStorage::kRemainder));
/// @endcode
///
/// Gradients are summed as those of float32 weights, however often the module is called. What reads
/// a weight outside of regions reads its 16 bits. Parameters stay the same tensors, shared ones
/// included. The module must run in regions of that dtype from now on. What is written into a
/// parameter later counts, with its 16 bits. Frozen parameters have no master: their float32 values
/// are gone, those of parameters that are frozen later when the next optimizer is made.
///
/// @param module  On one device, CPU or CUDA; without gradients.
/// @param options  The dtype of the regions, what stays float32, and how the weights are found.
/// @return What was done, parameter by parameter; "kept" is the reason of `keep`.
/// @throws c10::ValueError as convert(); for `grads` of another dtype, a parameter that has a
///     gradient, or a pattern that no parameter has. What `forward` throws passes through. Nothing
///     is changed then.
/// @throws c10::NotImplementedError  Gradients in float32 need a torch whose tensors have
///     set_grad_dtype().
/// @note Not thread-safe: the module may not be used meanwhile.
FASTAMP_API Conversion low_precision_weights_(torch::nn::Module& module,
                                              const LowPrecisionWeightsOptions& options = {});

}  // namespace fastamp::optim
