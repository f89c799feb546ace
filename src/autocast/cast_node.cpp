#include "autocast/cast_node.h"

#include "autocast/data_cast.h"
#include "autocast/plain.h"
#include "autocast/tracing.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <memory>
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

}  // namespace

void record_cast(const at::Tensor& source, const at::Tensor& out) {
  const std::shared_ptr<CastBackward> node(new CastBackward, autograd::deleteNode);
  node->set_next_edges(autograd::collect_next_edges(source));
  node->self_options = source.options();
  autograd::set_history(out, node);
}

const std::type_info& cast_node_type() { return typeid(CastBackward); }

}  // namespace fastamp::autocast
