// SPDX-License-Identifier: Apache-2.0
#include "float8/gradient_sum.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>

namespace fastamp::autocast {
namespace {

namespace autograd = torch::autograd;

/// The lock that a node of torch takes while it runs.
struct NodeLock : autograd::Node {
  static std::mutex& of(autograd::Node& node) { return node.*(&NodeLock::mutex_); }
};

/// Whether this call of backward() hands gradients to leaves and to nobody else, and nobody looks
/// at what nodes return.
bool only_accumulates() {
  const auto* const wanted = autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && wanted->empty() && !c10::GradMode::is_enabled() &&
         !autograd::AnomalyMode::is_enabled();
}

std::atomic<bool (*)(const at::Tensor& weight)> g_are_idle{nullptr};

/// Whether what is called after accumulation does nothing to a gradient of this dtype.
bool has_idle_hooks(const autograd::AccumulateGrad& leaf, c10::ScalarType dtype) {
  const auto are_idle = g_are_idle.load();
  return leaf.tensor_post_acc_grad_hooks() == nullptr ||
         (dtype == c10::kFloat && are_idle != nullptr && are_idle(leaf.variable));
}

/// Whether nobody sees the gradient of a leaf on its way, or is to be told of its arrival.
bool is_unwatched(autograd::AccumulateGrad& leaf, c10::ScalarType dtype) {
  return leaf.pre_hooks().empty() && leaf.post_hooks().empty() && leaf.tensor_pre_hooks().empty() &&
         leaf.retains_grad_hooks().empty() && has_idle_hooks(leaf, dtype);
}

}  // namespace

void ask_of_idle_hooks(bool (*are_idle)(const at::Tensor& weight)) { g_are_idle.store(are_idle); }

bool add_to_gradient(autograd::Node& node, std::size_t output, Float8Matrix a, Float8Matrix b,
                     c10::ScalarType dtype, bool fast_accumulate) {
  if (!has_float8_sums()) {
    return false;
  }
  auto* const leaf = dynamic_cast<autograd::AccumulateGrad*>(node.next_edge(output).function.get());
  if (leaf == nullptr || !only_accumulates() || !node.post_hooks().empty() ||
      !is_unwatched(*leaf, dtype) || node.stream() != leaf->stream()) {
    return false;
  }
  const std::scoped_lock lock(NodeLock::of(*leaf));
  const at::Tensor sum = leaf->variable.grad();
  if (!sum.defined() || sum.scalar_type() != dtype || sum.requires_grad() || sum.is_inference() ||
      !add_float8_product(sum, a, b, fast_accumulate)) {
    return false;
  }
  sum.unsafeGetTensorImpl()->bump_version();  // the keys that do so are excluded here
  return true;
}

}  // namespace fastamp::autocast
