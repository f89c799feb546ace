// SPDX-License-Identifier: Apache-2.0
#include "inference/convert.h"

#include "autocast/op_names.h"
#include "inference/weight_uses.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <ostream>
#include <string_view>
#include <utility>

namespace fastamp::autocast {
namespace {

std::vector<LoweredWeight> weights_of(const torch::nn::Module& module) {
  std::vector<LoweredWeight> weights;
  std::map<const void*, bool> seen;
  for (const auto& named : module.named_parameters()) {
    if (named.value().defined() &&
        !std::exchange(seen[named.value().unsafeGetTensorImpl()], true)) {
      weights.push_back({.name = named.key(), .tensor = named.value(), .reason = ""});
    }
  }
  return weights;
}

c10::DeviceType device_of(const char* function, const std::vector<LoweredWeight>& weights,
                          c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == c10::kHalf || dtype == c10::kBFloat16, function,
                    ": expected dtype to be float16 or bfloat16, got ", dtype, ".");
  TORCH_CHECK_VALUE(!weights.empty(), function, ": expected a module with parameters, got none.");
  const auto device = weights.front().tensor.device().type();
  for (const LoweredWeight& weight : weights) {
    TORCH_CHECK_VALUE(weight.tensor.device().type() == device, function,
                      ": expected all parameters on one device, got ", weight.name, " on ",
                      weight.tensor.device(), " and ", weights.front().name, " on ",
                      weights.front().tensor.device(), ".");
  }
  find_policy_devices(function, device);
  return device;
}

/// The op that a module of a known type gives its own parameters to; empty for other types.
std::string_view op_of(const torch::nn::Module& module) {
  if (module.as<torch::nn::LinearImpl>() != nullptr) {
    return "linear";
  }
  if (module.as<torch::nn::Conv1dImpl>() != nullptr) {
    return "conv1d";
  }
  if (module.as<torch::nn::Conv2dImpl>() != nullptr) {
    return "conv2d";
  }
  if (module.as<torch::nn::Conv3dImpl>() != nullptr) {
    return "conv3d";
  }
  if (module.as<torch::nn::ConvTranspose1dImpl>() != nullptr) {
    return "conv_transpose1d";
  }
  if (module.as<torch::nn::ConvTranspose2dImpl>() != nullptr) {
    return "conv_transpose2d.input";
  }
  return module.as<torch::nn::ConvTranspose3dImpl>() != nullptr ? "conv_transpose3d.input" : "";
}

bool is_lower(std::string_view op, c10::DeviceType device) {
  // LibTorch's Linear calls addmm, or matmul without a bias.
  const auto lower = [&](std::string_view name) {
    return op_policy(name, device) == OpPolicy::kLower;
  };
  return lower(op) && (op != "linear" || (lower("addmm") && lower("matmul")));
}

/// Lets the types of the modules that have each weight decide.
void decide_by_types(const torch::nn::Module& module, c10::DeviceType device,
                     std::vector<LoweredWeight>& weights) {
  std::map<const void*, std::string> refusals;
  std::map<const void*, int> owners;
  const auto look_at = [&](const torch::nn::Module& part) {
    const auto op = op_of(part);
    const bool is_lowered = !op.empty() && is_lower(op, device);
    for (const auto& own : part.named_parameters(/*recurse=*/false)) {
      ++owners[own.value().unsafeGetTensorImpl()];
      // LibTorch's Linear adds its bias to the product of an input that is no matrix, as it is.
      if (!is_lowered || (op == "linear" && own.key() == "bias")) {
        refusals.emplace(own.value().unsafeGetTensorImpl(), part.name());
      }
    }
  };
  look_at(module);  // By itself: modules() would want it to be in a shared_ptr.
  for (const auto& part : module.modules(/*include_self=*/false)) {
    look_at(*part);
  }
  for (LoweredWeight& weight : weights) {
    weight.casts = owners[weight.tensor.unsafeGetTensorImpl()];
    const auto found = refusals.find(weight.tensor.unsafeGetTensorImpl());
    if (found != refusals.end()) {
      weight.reason = found->second;
    }
  }
}

void decide_by_forward(const std::function<void()>& forward, c10::DeviceType device,
                       c10::ScalarType dtype, std::vector<LoweredWeight>& weights) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(weights.size());
  for (const LoweredWeight& weight : weights) {
    tensors.push_back(weight.tensor);
  }
  const at::NoGradGuard no_grad;
  const AutocastGuard region(device, dtype, /*enabled=*/true, /*cache_enabled=*/false);
  const WeightUses watcher(tensors);
  forward();
  const auto uses = watcher.uses();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i].reason = uses[i].is_used ? uses[i].read_by : "not used";
    weights[i].casts = uses[i].casts;
    weights[i].other_casts = uses[i].other_casts;
  }
}

std::uint64_t bytes_of(const std::vector<LoweredWeight>& weights) {
  std::uint64_t bytes = 0;
  for (const auto& weight : weights) {
    bytes += weight.tensor.nbytes();
  }
  return bytes;
}

}  // namespace

std::vector<LoweredWeight> find_lowered_weights(const char* function,
                                                const torch::nn::Module& module,
                                                c10::ScalarType dtype,
                                                const std::function<void()>& forward) {
  auto weights = weights_of(module);
  const auto device = device_of(function, weights, dtype);
  if (forward) {
    decide_by_forward(forward, device, dtype, weights);
  } else {
    decide_by_types(module, device, weights);
  }
  for (LoweredWeight& weight : weights) {
    if (weight.tensor.scalar_type() != c10::kFloat) {
      weight.reason = c10::toString(weight.tensor.scalar_type());
    }
  }
  return weights;
}

Conversion lower_weights(const std::vector<LoweredWeight>& weights, c10::ScalarType dtype) {
  Conversion done{dtype, {}, bytes_of(weights), 0};
  for (const auto& weight : weights) {
    const bool is_converted = weight.reason.empty();
    if (is_converted) {
      weight.tensor.set_data(weight.tensor.data().to(dtype));
    }
    done.parameters.push_back({weight.name, is_converted, weight.reason,
                               static_cast<std::uint64_t>(weight.tensor.numel())});
  }
  done.bytes_after = bytes_of(weights);
  return done;
}

}  // namespace fastamp::autocast

namespace fastamp {
namespace {

constexpr double kMegabyte = 1e6;

}  // namespace

std::ostream& operator<<(std::ostream& out, const Conversion& conversion) {
  std::size_t converted = 0;
  for (const auto& parameter : conversion.parameters) {
    converted += parameter.is_converted ? 1 : 0;
  }
  out << converted << " of " << conversion.parameters.size() << " parameters in "
      << conversion.dtype << ", " << static_cast<double>(conversion.bytes_after) / kMegabyte
      << " MB instead of " << static_cast<double>(conversion.bytes_before) / kMegabyte << '\n';
  for (const auto& parameter : conversion.parameters) {
    if (!parameter.is_converted) {
      out << "  stays: " << parameter.name << " (" << parameter.reason << ")\n";
    }
  }
  return out;
}

Conversion convert(torch::nn::Module& module, c10::ScalarType dtype,
                   const std::function<void()>& forward) {
  return autocast::lower_weights(autocast::find_lowered_weights("convert", module, dtype, forward),
                                 dtype);
}

}  // namespace fastamp
