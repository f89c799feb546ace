// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_node.h"

#include "autocast/data_cast.h"
#include "autocast/make_node.h"
#include "core/interception.h"
#include "trace/events.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <utility>

namespace fastamp::autocast {
namespace {

namespace autograd = torch::autograd;

/// torch's own node for a cast, so that its name, its double backward and compiled autograd are
/// torch's; only the ordinary backward of an ordinary gradient is shorter.
struct CastBackward final : autograd::generated::ToCopyBackward0 {
  using ToCopyBackward0::ToCopyBackward0;

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    const at::Tensor& grad = grads[0];
    const auto dtype = c10::typeMetaToScalarType(self_options.dtype());
    if (grad.defined() && !c10::GradMode::is_enabled() && task_should_compute_output(0) &&
        grad.scalar_type() != dtype && grad.device() == self_options.device() &&
        can_bypass_dispatcher(grad)) {
      at::Tensor out = cast_data(grad, dtype);
      note_gradient_cast(out);
      return {std::move(out)};
    }
    auto out = ToCopyBackward0::apply(std::move(grads));
    if (out[0].defined()) {
      note_gradient_cast(out[0]);
    }
    return out;
  }
};

void record_with(const at::TensorOptions& options, const at::Tensor& source, const at::Tensor& out,
                 NodeOrder order) {
  const NodePtr node = make_node<CastBackward>(order);
  node->set_next_edges(autograd::collect_next_edges(source));
  static_cast<CastBackward&>(*node).self_options = options;
  autograd::set_history(out, node);
  announce_node(node);
}

/// Whether one reference to a tensor exists, beside that of a Python object that only the tensor
/// itself keeps.
template <class Slot = c10::impl::PyObjectSlot>
bool is_held_once(const at::Tensor& tensor) {
  if (tensor.use_count() == 1) {
    return true;
  }
  if constexpr (requires(const Slot& slot) { slot.has_unique_reference(); }) {
    // Where objects hold their tensors: so does this one, for as long as anything else does.
    const Slot& slot = *tensor.unsafeGetTensorImpl()->pyobj_slot();
    return tensor.use_count() == 2 && slot.has_unique_reference();
  }
  return false;
}

}  // namespace

bool is_sole_user_of_source(const at::Tensor& cast) {
  const NodePtr& node = cast.grad_fn();
  if (node == nullptr || !is_held_once(cast) || node.use_count() != 1 || node->num_outputs() != 1) {
    return false;
  }
  const NodePtr& leaf = node->next_edge(0).function;
  const auto* const accumulate = dynamic_cast<const autograd::AccumulateGrad*>(leaf.get());
  return accumulate != nullptr && leaf.use_count() == 1 && is_held_once(accumulate->variable);
}

bool is_recorded(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.requires_grad() &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

NodeOrder take_node_order() { return at::sequence_number::get_and_increment(); }

void record_cast(const at::Tensor& source, const at::Tensor& out) {
  record_cast(source, out, take_node_order());
}

void record_cast(const at::Tensor& source, const at::Tensor& out, NodeOrder order) {
  record_with(source.options(), source, out, order);
}

void record_cast_from(const at::Tensor& source, const at::TensorOptions& options,
                      const at::Tensor& out) {
  record_with(options, source, out, take_node_order());
}

void require_grad_alone(const at::Tensor& source, const at::Tensor& out) {
  const NodePtr node = make_node<CastBackward>(NodeOrder{0});
  static_cast<CastBackward&>(*node).self_options = source.options();
  autograd::set_history(out, node);
}

const std::type_info& cast_node_type() { return typeid(CastBackward); }

NodePtr torchs_cast_node() { return make_node<autograd::generated::ToCopyBackward0>(); }

}  // namespace fastamp::autocast
