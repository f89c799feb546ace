// SPDX-License-Identifier: Apache-2.0
#include "autocast/weight_aliases.h"

#include "autocast/cast_node.h"
#include "autocast/data_cast.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"
#include "core/interception.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastamp::autocast {

std::atomic<int> g_low_precision_weights{0};

namespace {

using WeakWeight = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct LowPrecisionWeights {
  std::shared_mutex mutex;
  // As long as a weak pointer lives, no other tensor comes to live at the address that is its key.
  std::unordered_map<const c10::TensorImpl*, WeakWeight> by_impl;
};

/// Never destroyed: other threads may run ops while the process exits.
LowPrecisionWeights& low_precision_weights() {
  static auto* const instance = new LowPrecisionWeights();
  return *instance;
}

/// Calls what torch has from 2.11 on; a template, so that it need not be there.
template <typename Metadata>
void expect_float(Metadata& metadata) {
  if constexpr (requires { metadata.set_grad_dtype(std::optional(c10::kFloat)); }) {
    if (metadata.grad_dtype() != c10::kFloat) {
      metadata.set_grad_dtype(c10::kFloat);
    }
  }
}

/// Makes backward passes through today's graph cast each gradient before it is summed with others.
/// Not by the weight's `grad_dtype`: whoever gives it a gradient by hand makes one of its dtype.
void sum_in_float(const at::Tensor& weight) {
  expect_float(torch::autograd::impl::grad_accumulator(weight)->mutable_input_metadata(0));
}

/// The leaf of which a tensor is a view, or null.
const at::Tensor* leaf_below(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (meta == nullptr || !meta->has_bw_view()) {
    return nullptr;
  }
  const at::Tensor& base = meta->get_backward_view().base_;
  return base.is_leaf() ? &base : nullptr;
}

}  // namespace

void mark_low_precision_weights(at::TensorList weights) {
  std::vector<WeakWeight> gone;
  const std::unique_lock lock(low_precision_weights().mutex);
  auto& all = low_precision_weights().by_impl;
  for (auto entry = all.begin(); entry != all.end();) {
    if (entry->second.expired()) {
      gone.push_back(std::move(entry->second));
      entry = all.erase(entry);
    } else {
      ++entry;
    }
  }
  for (const auto& weight : weights) {
    all.emplace(weight.unsafeGetTensorImpl(), WeakWeight(weight.getIntrusivePtr()));
  }
  g_low_precision_weights.store(static_cast<int>(all.size()), std::memory_order_relaxed);
}

bool is_low_precision_weight(const at::Tensor& tensor) {
  if (!has_low_precision_weights()) {
    return false;
  }
  const std::shared_lock lock(low_precision_weights().mutex);
  return low_precision_weights().by_impl.contains(tensor.unsafeGetTensorImpl());
}

at::Tensor alias_of_low_precision_weight(const at::Tensor& argument, c10::ScalarType lower) {
  if (!is_recorded(argument) || argument.scalar_type() != lower) {
    return {};
  }
  if (!argument.is_leaf()) {
    if (const at::Tensor* leaf = leaf_below(argument);
        leaf != nullptr && is_low_precision_weight(*leaf)) {
      sum_in_float(*leaf);
    }
    return {};
  }
  const bool cache_enabled = is_weight_cache_enabled();
  at::Tensor alias;
  if (cache_enabled) {
    alias = find_weight_cast(argument, lower, CastUse::kByOp);
  }
  if (alias.defined() || !is_low_precision_weight(argument) ||
      call_path(argument) == CallPath::kIntercepted) {
    return alias;
  }
  sum_in_float(argument);
  alias = make_alias(argument);
  record_cast_from(argument, argument.options().dtype(c10::kFloat), alias);
  if (cache_enabled && is_keepable(argument)) {
    keep_weight_cast(argument, lower, alias, CastUse::kByOp);
  }
  return alias;
}

}  // namespace fastamp::autocast
