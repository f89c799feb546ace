// SPDX-License-Identifier: Apache-2.0
#include "float8/linear_backward.h"

#include "autocast/make_node.h"
#include "autocast/weight_aliases.h"
#include "float8/gradient_sum.h"
#include "float8/product.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/sum_ops.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/SymInt.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fastamp::autocast {
namespace {

namespace autograd = torch::autograd;

/// Stands in the graph of a gradient that was computed with create_graph=True.
class LinearFloat8DoubleBackward final : public autograd::Node {
 public:
  using Node::Node;

  std::string name() const override { return "LinearFloat8DoubleBackward"; }

 protected:
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): the base's signature
  autograd::variable_list apply(autograd::variable_list&& /*grads*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "LinearFloat8Backward: expected to be differentiated once, got a second differentiation "
        "(create_graph=True). Products in fp8 have no second derivative: run the part of the model "
        "that needs one in the region's 16-bit dtype, in fastamp.autocast(..., float8=False), in "
        "C++ in an AutocastGuard without a recipe.");
  }
};

/// float32 if whoever takes a gradient along an edge keeps it so, as of a 16-bit weight with that
/// `grad_dtype` (torch 2.11 and later). A template, so that torch need not have it.
template <typename Metadata>
c10::ScalarType kept_dtype(const Metadata& metadata, c10::ScalarType otherwise) {
  if constexpr (requires { metadata.grad_dtype(); }) {
    return metadata.grad_dtype() == c10::kFloat ? c10::kFloat : otherwise;
  } else {
    return otherwise;
  }
}

/// The dtype of a parameter's gradient, if whoever keeps it does not ask for another.
c10::ScalarType gradient_dtype(const at::Tensor& parameter) {
  return is_low_precision_weight(parameter) ? c10::kFloat : parameter.scalar_type();
}

/// The casts of dY have one scale for the whole, which a vmapped gradient does not have.
void refuse_batched(const at::Tensor& grad) {
  constexpr c10::DispatchKeySet kBatched(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  TORCH_CHECK_NOT_IMPLEMENTED(
      !grad.key_set().has_any(kBatched),
      "LinearFloat8Backward: expected one gradient, got a batch of them (is_grads_batched=True, "
      "torch.vmap over a backward pass). Products in fp8 take one at a time: call "
      "torch.autograd.grad once for each, or run the part of the model in the region's 16-bit "
      "dtype, in fastamp.autocast(..., float8=False), in C++ in an AutocastGuard without a "
      "recipe.");
}

struct Shape {
  std::vector<c10::SymInt> x_sizes;
  c10::ScalarType x_dtype;
  c10::ScalarType weight_dtype;  ///< Of the gradient, as bias_dtype.
  c10::ScalarType bias_dtype;
  bool weight_is_transposed;    ///< The weight was given as [K, N],
  bool weight_is_column_major;  ///< and lies as [N, K] in memory.
};

/// The backward pass of a product in fp8: dX = dY W and dW = dY^T X, with dY cast to fp8 as well.
class LinearFloat8Backward final : public autograd::Node {
 public:
  static constexpr std::size_t kX = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kBias = 2;

  LinearFloat8Backward(Shape shape, const Float8Setting& setting, const Float8Cast& x,
                       const Float8Cast& weight, AgreeOnAmax agree)
      : shape_(std::move(shape)),
        setting_(setting),
        agree_(std::move(agree)),
        x_has_columns_(x.columns.defined()),
        weight_has_columns_(weight.columns.defined()) {
    x_ = saved(x);
    x_inverse_ = saved(x.inverse_scale);
    weight_ = saved(weight);
    weight_inverse_ = saved(weight.inverse_scale);
  }

  std::string name() const override { return "LinearFloat8Backward"; }

  void release_variables() override {
    const std::scoped_lock lock(mutex_);
    for (auto* variable : {&x_, &x_inverse_, &weight_, &weight_inverse_}) {
      variable->reset_data();
    }
  }

 protected:
  autograd::variable_list apply(autograd::variable_list&& grads) override {
    const at::Tensor grad = std::move(grads).at(0);
    const std::scoped_lock lock(mutex_);
    // Before the keys are excluded: a hook of the user may run a whole forward pass.
    const Saved saved = unpack();
    autograd::variable_list out(3);
    if (!grad.defined()) {
      return out;
    }
    refuse_batched(grad);
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
      differentiate(grad, saved, out);
    }
    if (c10::GradMode::is_enabled()) {
      refuse_more(grad, out);
    }
    return out;
  }

 private:
  /// A cast's copy for backward and its scale.
  struct Saved {
    Float8Cast x;
    Float8Cast weight;
  };

  static autograd::SavedVariable saved(const at::Tensor& tensor) {
    return tensor.defined() ? autograd::SavedVariable(tensor, /*is_output=*/false)
                            : autograd::SavedVariable();
  }

  static autograd::SavedVariable saved(const Float8Cast& cast) {
    return saved(cast.columns.defined() ? cast.columns : cast.rows);
  }

  Saved unpack() const {
    Saved out;
    out.x.columns = x_.unpack();
    out.x.inverse_scale = x_inverse_.unpack();
    out.weight.columns = weight_.unpack();
    out.weight.inverse_scale = weight_inverse_.unpack();
    return out;
  }

  static at::Tensor columns(const at::Tensor& saved, bool has_columns) {
    return has_columns ? saved : float8_columns(saved);
  }

  /// The gradient of y in fp8.
  Float8Cast cast(const at::Tensor& grad, Float8Wanted wanted) const {
    if (!agree_) {
      return cast_to_float8(grad, setting_.grad_dtype, wanted);
    }
    const at::Tensor amax = float8_amax(grad);
    agree_(amax);
    return cast_part_to_float8(grad, amax, setting_.grad_dtype, wanted);
  }

  void differentiate(const at::Tensor& grad, const Saved& saved, autograd::variable_list& out) {
    const bool wants_x = saved.weight.columns.defined() && task_should_compute_output(kX);
    const bool wants_weight = saved.x.columns.defined() && task_should_compute_output(kWeight);
    const bool wants_bias = task_should_compute_output(kBias);
    const at::Tensor matrix = as_matrix(grad);
    if (!wants_x && !wants_weight) {
      if (wants_bias) {
        out[kBias] = matrix.sum({0}, /*keepdim=*/false, c10::kFloat).to(bias_dtype());
      }
      return;
    }
    const Float8Cast grads =
        cast(matrix, {.rows = wants_x, .columns = wants_weight, .column_sums = wants_bias});
    if (wants_x) {
      const at::Tensor weight = columns(saved.weight.columns, weight_has_columns_);
      out[kX] = float8_product(rows_of(grads), {weight, saved.weight.inverse_scale}, std::nullopt,
                               shape_.x_dtype, setting_.fast_accumulate[1])
                    .reshape_symint(shape_.x_sizes);
    }
    if (wants_weight) {
      const at::Tensor x = columns(saved.x.columns, x_has_columns_);
      out[kWeight] = weight_gradient(columns_of(grads), {x, saved.x.inverse_scale});
    }
    if (wants_bias) {
      out[kBias] = grads.column_sums.to(bias_dtype());
    }
  }

  c10::ScalarType dtype_of(std::size_t operand, c10::ScalarType otherwise) const {
    const auto& edge = next_edge(operand);
    return kept_dtype(edge.function->input_metadata(edge.input_nr), otherwise);
  }

  c10::ScalarType bias_dtype() const { return dtype_of(kBias, shape_.bias_dtype); }

  /// Computes it in the layout of the weight and the dtype of its gradient, so that it becomes
  /// `.grad`, or is added to it, without a copy; undefined if it has been added already.
  at::Tensor weight_gradient(Float8Matrix grad, Float8Matrix x) {
    const bool fast = setting_.fast_accumulate[2];
    const c10::ScalarType dtype = dtype_of(kWeight, shape_.weight_dtype);
    const bool is_column_major = shape_.weight_is_transposed && shape_.weight_is_column_major;
    const bool is_transposed = shape_.weight_is_transposed && !is_column_major;
    const Float8Matrix left = is_transposed ? x : grad;
    const Float8Matrix right = is_transposed ? grad : x;
    if (!is_column_major && add_to_gradient(*this, kWeight, left, right, dtype, fast)) {
      return {};
    }
    const at::Tensor out = float8_product(left, right, std::nullopt, dtype, fast);
    return is_column_major ? out.t() : out;
  }

  /// Differentiating the gradients again raises an error, instead of taking them for constants.
  void refuse_more(const at::Tensor& grad, const autograd::variable_list& out) const {
    for (const at::Tensor& gradient : out) {
      if (gradient.defined()) {
        auto edges = next_edges();
        edges.push_back(autograd::impl::gradient_edge(grad));
        autograd::set_history(gradient, make_node<LinearFloat8DoubleBackward>(std::move(edges)));
      }
    }
  }

  Shape shape_;
  const Float8Setting& setting_;  // Interned: lives as long as the process.
  AgreeOnAmax agree_;
  // Else rows are saved: of a product that was traced, and of a weight that came in fp8.
  bool x_has_columns_;
  bool weight_has_columns_;
  autograd::SavedVariable x_;
  autograd::SavedVariable x_inverse_;
  autograd::SavedVariable weight_;
  autograd::SavedVariable weight_inverse_;
};

}  // namespace

void record_float8_product(const Float8Operands& operands, const Float8Setting& setting,
                           const Float8Cast& x, const Float8Cast& weight, const at::Tensor& y,
                           AgreeOnAmax agree) {
  const at::Tensor& bias = operands.bias;
  const NodePtr node = make_node<LinearFloat8Backward>(
      Shape{.x_sizes = operands.x.sym_sizes().vec(),
            .x_dtype = operands.x.scalar_type(),
            .weight_dtype = gradient_dtype(operands.weight),
            .bias_dtype = bias.defined() ? gradient_dtype(bias) : c10::ScalarType::Undefined,
            .weight_is_transposed = operands.weight_is_transposed,
            .weight_is_column_major = operands.weight.sym_stride(0) == 1},
      setting, x, weight, std::move(agree));
  node->set_next_edges(autograd::collect_next_edges(operands.x, operands.weight, bias));
  autograd::set_history(y, node);
  announce_node(node);
}

}  // namespace fastamp::autocast
