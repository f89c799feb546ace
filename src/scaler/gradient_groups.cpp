// SPDX-License-Identifier: Apache-2.0
#include "scaler/gradient_groups.h"

#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "core/tensor_lists.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace fastamp::scaler {
namespace {

using TensorPtr = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Whether a tensor may have an address, by what it has in common with the next ones.
bool may_be_array(const at::Tensor& tensor) {
  return is_ordinary_cpu(tensor) && kernels::is_gradient_dtype(tensor.scalar_type());
}

/// Refuses what neither a kernel of fastamp nor torch's can unscale, before anything is written:
/// CSR and its like, mkldnn, nested tensors.
void check_is_unscaled_by_someone(const at::Tensor& gradient, const at::Tensor& parameter) {
  constexpr c10::DispatchKeySet kUnscaled(
      {c10::DispatchKey::Dense, c10::DispatchKey::Sparse, c10::DispatchKey::Python});
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.key_set().has_any(kUnscaled),
      "unscale_: expected gradients that are strided or sparse (coordinates and values), got ",
      gradient.is_nested() ? "a nested one" : c10::str("one of layout ", gradient.layout()),
      " for a parameter", has_geometry(parameter) ? c10::str(" of shape ", parameter.sizes()) : "",
      ".");
}

/// The array that an ordinary gradient is; none if it is strided, if it is for the kernel to find
/// out whether its storage has to be written, or if its memory was freed, which the operator has an
/// error for.
std::optional<kernels::HostArray> array_of(const at::Tensor& gradient) {
  const auto* const impl = gradient.unsafeGetTensorImpl();
  if (!impl->is_non_overlapping_and_dense()) [[unlikely]] {
    return std::nullopt;
  }
  void* const address = address_of(*impl);
  const auto numel = impl->numel();
  if (address == nullptr && (numel > 0 || !impl->has_storage())) [[unlikely]] {
    return std::nullopt;
  }
  return kernels::HostArray{numel == 0 ? nullptr : address, numel, gradient.scalar_type()};
}

}  // namespace

bool has_checks(const DeviceGradients& gradients) {
  return has_kernels(gradients.device.type()) && !gradients.any_double && !gradients.any_functional;
}

void unscale_with_torch(std::vector<at::Tensor> gradients, const at::Tensor& inv_scale,
                        at::Tensor& found_inf) {
  while (!gradients.empty()) {
    const auto dtype = gradients.front().scalar_type();
    const auto others = std::ranges::partition(
        gradients, [dtype](const at::Tensor& gradient) { return gradient.scalar_type() == dtype; });
    const auto count = static_cast<std::size_t>(others.begin() - gradients.begin());
    const at::TensorList same(gradients.data(), count);
    at::_amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale);
    // It has checked what it read; now what it wrote.
    at::_amp_foreach_non_finite_check_and_unscale_(same, found_inf, at::ones_like(inv_scale));
    gradients.erase(gradients.begin(), others.begin());
  }
}

DeviceGradients& GradientGroups::group_for(c10::Device device) {
  for (auto& group : groups_) {
    if (group.device == device) {
      return group;
    }
  }
  last_ = nullptr;  // The vector may move its elements.
  auto& group = groups_.emplace_back(DeviceGradients{.device = device,
                                                     .gradients = {},
                                                     .positions = {},
                                                     .arrays = {},
                                                     .as_arrays = device.is_cpu()});
  if (device.is_cpu() && wants_arrays_) {
    group.arrays.reserve(expected_);
  }
  group.positions.reserve(expected_);
  group.gradients.reserve(std::exchange(expected_, 0));
  return group;
}

void GradientGroups::push(const at::Tensor& gradient, std::uint32_t position) {
  auto& group = group_for(gradient.device());
  group.gradients.push_back(gradient);
  group.positions.push_back(position);
  group.any_double = group.any_double || gradient.scalar_type() == at::kDouble;
  group.any_functional =
      group.any_functional || gradient.key_set().has(c10::DispatchKey::Functionalize);
  if (!may_be_array(gradient)) {
    group.as_arrays = false;
    group.arrays.clear();
  }
  last_ = &group;
}

GradientGroups::Taken GradientGroups::add_other(const at::Tensor& parameter,
                                                const at::Tensor& gradient,
                                                std::uint32_t position) {
  TORCH_CHECK_VALUE(allow_fp16_ || gradient.scalar_type() != at::kHalf,
                    "unscale_: expected gradients of float32, bfloat16 or float64, got float16 for "
                    "a parameter",
                    has_geometry(parameter) ? c10::str(" of shape ", parameter.sizes()) : "",
                    ". Attempting to unscale FP16 gradients. Keep the parameters in float32 and "
                    "let autocast lower the operators, or step them with masters: "
                    "fastamp.optim.fuse_(optimizer, widen_grads=True).");
  if (wants_pass_) {
    check_is_unscaled_by_someone(gradient, parameter);
  }
  const auto keys = gradient.key_set();
  if (keys.has(c10::DispatchKey::Python)) {
    return Taken::kForeign;
  }
  const bool again = comes_again(gradient);
  if (gradient.is_sparse()) {
    sparse_.push_back(
        {.parameter = parameter, .gradient = gradient, .position = position, .repeats = again});
    return Taken::kYes;
  }
  if (again) {
    return Taken::kYes;
  }
  push(gradient, position);
  last_keys_ = keys;
  last_dtype_ = gradient.scalar_type();
  return Taken::kYes;
}

// A gradient is five dependent loads away from its parameter: autograd data, gradient, storage, and
// that which they hold. A block is taken through them stage by stage, so that each stage waits once
// for all of the block and not for every parameter.
std::uint32_t GradientGroups::add_block(c10::ArrayRef<c10::TensorImpl*> parameters) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(parameters.size() <= kBlock);
  static const at::Tensor none;
  std::array<const at::Tensor*, kBlock> gradients{};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto* meta = parameters[i]->autograd_meta();
    gradients[i] =
        meta == nullptr ? &none : &static_cast<const torch::autograd::AutogradMeta*>(meta)->grad_;
    __builtin_prefetch(gradients[i]);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    prefetch_tensor(gradients[i]->unsafeGetTensorImpl());
  }
  std::uint32_t foreign = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = *gradients[i];
    if (!gradient.defined()) {
      skip();
      continue;
    }
    const auto position = parameters_++;
    if (add_like_last(gradient, position)) [[likely]] {
      prefetch_storage(gradient.unsafeGetTensorImpl());
      continue;
    }
    const at::Tensor parameter(TensorPtr::reclaim_copy(parameters[i]));
    if (add_other(parameter, gradient, position) == Taken::kForeign) {
      foreign |= 1U << i;
    }
  }
  for (auto& group : groups_) {
    take_arrays(group);
  }
  return foreign;
}

bool GradientGroups::add_all(at::TensorList parameters) {
  std::array<c10::TensorImpl*, kBlock> block{};
  for (std::size_t begin = 0; begin < parameters.size(); begin += kBlock) {
    const auto count = std::min(kBlock, parameters.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      block.at(i) = parameters[begin + i].unsafeGetTensorImpl();
      __builtin_prefetch(block.at(i));
    }
    if (add_block({block.data(), count}) != 0) {
      return false;
    }
  }
  return true;
}

void GradientGroups::take_arrays(DeviceGradients& group) const {
  if (!wants_arrays_ || !group.as_arrays) {
    return;
  }
  for (auto i = group.arrays.size(); i < group.gradients.size(); ++i) {
    const auto array = array_of(group.gradients[i]);
    if (!array) [[unlikely]] {
      group.as_arrays = false;
      group.arrays.clear();
      return;
    }
    group.arrays.push_back(*array);
  }
}

void GradientGroups::insert_all(PointerSet& known) const {
  for (const auto& group : groups_) {
    for (const auto& gradient : group.gradients) {
      known.insert(gradient.unsafeGetTensorImpl());
    }
  }
  for (const auto& entry : sparse_) {
    known.insert(entry.gradient.unsafeGetTensorImpl());
  }
}

void GradientGroups::take_sparse_values() {
  std::vector<std::pair<at::Tensor, at::Tensor>> coalesced;
  for (auto& [parameter, gradient, position, repeats] : sparse_) {
    if (repeats) {
      for (const auto& [before, after] : coalesced) {
        if (before.is_same(gradient)) {
          parameter.mutable_grad() = after;  // Else it would be left with the scaled one.
        }
      }
      continue;
    }
    // Adding duplicates in fp16 can overflow although every summand is finite, so the check must
    // see the sums. fp32 duplicates are left as they are: unscaling is linear.
    if (coalesce_all_ || gradient.scalar_type() == at::kHalf) {
      give_up_addresses();  // The gradient that is replaced may run code when it goes.
      coalesced.emplace_back(gradient, gradient.coalesce());
      parameter.mutable_grad() = gradient = coalesced.back().second;
    }
    push(gradient._values(), position);
    last_->any_duplicates = last_->any_duplicates || !gradient.is_coalesced();
  }
  last_ = nullptr;
  sparse_.clear();
}

std::vector<DeviceGradients> GradientGroups::release() {
  const at::NoGradGuard no_grad;
  take_sparse_values();
  parameters_ = 0;
  finder_ = {};
  for (auto& group : groups_) {
    take_arrays(group);
    if (!wants_arrays_) {
      group.arrays.clear();
    }
  }
  return std::exchange(groups_, {});
}

}  // namespace fastamp::scaler
