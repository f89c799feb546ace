// The fused steps as dispatcher ops: typed entries, version counters, Meta and the last resort.
// (ops/autograd.cpp and ops/unsupported.cpp say why.) The real kernels are in kernels/.

#include "kernels/fused_adamw.h"
#include "kernels/fused_sgd.h"
#include "ops/from_args.h"
#include "ops/inplace.h"

#include <fastamp/ops/fused_steps.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace fastamp::ops {
namespace {

using kernels::FusedAdamwArgs;
using kernels::FusedSgdArgs;

template <typename Fn>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Fn>();
}

void bump(const FusedSgdArgs& args) {
  bump_versions(args.params);
  bump_versions(args.momentum_buffers);
  bump_versions(args.momentum_steps);
  bump_versions(args.masters);
  if (args.write_grads) {
    bump_versions(args.grads);
  }
}

void bump(const FusedAdamwArgs& args) {
  bump_versions(args.params);
  bump_versions(args.exp_avgs);
  bump_versions(args.exp_avg_sqs);
  bump_versions(args.max_exp_avg_sqs);
  bump_versions(args.state_steps);
  bump_versions(args.masters);
  if (args.write_grads) {
    bump_versions(args.grads);
  }
}

void check_sgd(const FusedSgdArgs& args) { kernels::check_fused_sgd(args); }

void refuse_sgd(const FusedSgdArgs& args) {
  check_sgd(args);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "fused_sgd_: expected tensors on cpu or, in a CUDA build, on cuda, got ",
      args.params[0].device());
}

void check_adamw(const FusedAdamwArgs& args) { kernels::check_fused_adamw(args); }

void refuse_adamw(const FusedAdamwArgs& args) {
  check_adamw(args);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "fused_adamw_: expected tensors on cpu or, in a CUDA build, on cuda, got ",
      args.params[0].device());
}

/// Below autograd's keys first, then the versions: a call that throws bumps none.
template <typename Args, auto kOp>
struct Inplace;
template <typename Args, typename... T, void (*kOp)(T...)>
struct Inplace<Args, kOp> {
  static inline const char* name = nullptr;
  static void call(c10::DispatchKeySet keys, T... args) {
    static const auto op = find_op<void(T...)>(name);
    op.redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
    bump(Args{args...});
  }
  static auto named(const char* op_name) {
    name = op_name;
    return &call;
  }
};

}  // namespace

void fused_sgd_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                at::TensorList momentum_steps, at::TensorList masters, at::IntArrayRef group_sizes,
                at::ArrayRef<double> lr, at::ArrayRef<double> momentum,
                at::ArrayRef<double> dampening, at::ArrayRef<double> weight_decay,
                const c10::List<bool>& nesterov, const c10::List<bool>& maximize,
                at::TensorList lr_tensors, const std::optional<at::Tensor>& inv_scale,
                const std::optional<at::Tensor>& clip_coef,
                const std::optional<at::Tensor>& found_inf, bool write_grads) {
  static const auto op = find_op<decltype(fused_sgd_)>("fastamp::fused_sgd_");
  op.call(params, grads, momentum_buffers, momentum_steps, masters, group_sizes, lr, momentum,
          dampening, weight_decay, nesterov, maximize, lr_tensors, inv_scale, clip_coef, found_inf,
          write_grads);
}

void fused_adamw_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                  at::TensorList state_steps, at::TensorList masters, at::IntArrayRef group_sizes,
                  at::ArrayRef<double> lr, at::ArrayRef<double> beta1, at::ArrayRef<double> beta2,
                  at::ArrayRef<double> eps, at::ArrayRef<double> weight_decay,
                  const c10::List<bool>& decoupled, const c10::List<bool>& amsgrad,
                  const c10::List<bool>& maximize, at::TensorList lr_tensors,
                  const std::optional<at::Tensor>& inv_scale,
                  const std::optional<at::Tensor>& clip_coef,
                  const std::optional<at::Tensor>& found_inf, bool write_grads) {
  static const auto op = find_op<decltype(fused_adamw_)>("fastamp::fused_adamw_");
  op.call(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, masters, group_sizes,
          lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, lr_tensors, inv_scale,
          clip_coef, found_inf, write_grads);
}

}  // namespace fastamp::ops

TORCH_LIBRARY_IMPL(fastamp, Autograd, m) {
  m.impl("fused_adamw_", torch::CppFunction::makeFallthrough());
  m.impl("fused_sgd_", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fastamp, ADInplaceOrView, m) {
  using namespace fastamp::ops;
  m.impl("fused_adamw_", Inplace<FusedAdamwArgs, fused_adamw_>::named("fastamp::fused_adamw_"));
  m.impl("fused_sgd_", Inplace<FusedSgdArgs, fused_sgd_>::named("fastamp::fused_sgd_"));
}

TORCH_LIBRARY_IMPL(fastamp, Meta, m) {
  using namespace fastamp::ops;
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, check_adamw>::of(fused_adamw_));
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, check_sgd>::of(fused_sgd_));
}

TORCH_LIBRARY_IMPL(fastamp, CompositeExplicitAutograd, m) {
  using namespace fastamp::ops;
  m.impl("fused_adamw_", FromArgs<FusedAdamwArgs, refuse_adamw>::of(fused_adamw_));
  m.impl("fused_sgd_", FromArgs<FusedSgdArgs, refuse_sgd>::of(fused_sgd_));
}
