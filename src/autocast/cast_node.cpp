#include "autocast/cast_node.h"

#include "autocast/data_cast.h"
#include "autocast/plain.h"
#include "autocast/tracing.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace fastamp::autocast {
namespace {

namespace autograd = torch::autograd;

/// torch's own node for a cast, so that its name, its double backward and compiled autograd are
/// torch's; only the ordinary backward of an ordinary gradient is shorter.
struct CastBackward final : autograd::generated::ToCopyBackward0 {
  autograd::variable_list apply(autograd::variable_list&& grads) override {
    const at::Tensor& grad = grads[0];
    const auto dtype = c10::typeMetaToScalarType(self_options.dtype());
    if (grad.defined() && !c10::GradMode::is_enabled() && task_should_compute_output(0) &&
        grad.scalar_type() != dtype && grad.device() == self_options.device() && is_plain(grad)) {
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

// torch holds nodes by std::shared_ptr, later versions by c10::intrusive_ptr: whatever grad_fn
// returns. Templates, since only one of the two compiles.
template <class Node>
std::shared_ptr<Node> make_node(const std::shared_ptr<Node>* /*held_by*/) {
  // Found by its argument, as it is gone where nodes count their references.
  return std::shared_ptr<Node>(new CastBackward, [](auto* node) { deleteNode(node); });
}

template <class Node>
c10::intrusive_ptr<Node> make_node(const c10::intrusive_ptr<Node>* /*held_by*/) {
  return c10::make_intrusive<CastBackward>();
}

using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

}  // namespace

void record_cast(const at::Tensor& source, const at::Tensor& out) {
  const NodePtr node = make_node(static_cast<const NodePtr*>(nullptr));
  node->set_next_edges(autograd::collect_next_edges(source));
  static_cast<CastBackward&>(*node).self_options = source.options();
  autograd::set_history(out, node);
}

const std::type_info& cast_node_type() { return typeid(CastBackward); }

}  // namespace fastamp::autocast
