// SPDX-License-Identifier: Apache-2.0
#include "kernels/amp_args.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/amp_ops.h>

#include <tuple>

namespace fastamp::ops {
namespace {

struct NormAndCheck {
  using Args = kernels::NormArgs;
  static constexpr auto kName = "norm_and_check_";
  static constexpr auto kArguments =
      std::tuple{FASTAMP_ARG(grads),
                 FASTAMP_ARG(inv_scale),
                 FASTAMP_ARG(found_inf, Access::kWrite),
                 FASTAMP_ARG(sum_of_squares, Access::kWrite),
                 FASTAMP_ARG(non_finite_counts, Access::kWrite),
                 FASTAMP_ARG(max_norm),
                 FASTAMP_ARG(clip_coef, Access::kWrite),
                 FASTAMP_ARG(total_norm, Access::kWrite),
                 FASTAMP_ARG(overwrite_found_inf, Access::kRead, "False")};
  static constexpr auto kCpu = kernels::norm_and_check_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::norm_and_check;

  static void check(const Args& args) { check_norm(args); }
  static c10::Device device(const Args& args) { return args.inv_scale.device(); }
};

FASTAMP_REGISTER_OP(NormAndCheck);

}  // namespace

void check_norm(const kernels::NormArgs& args) {
  constexpr auto kFunction = "norm_and_check_";
  const auto device = check_first(kFunction, "inv_scale", args.inv_scale, at::kFloat);
  check_single(kFunction, "found_inf", args.found_inf, at::kFloat, device, "inv_scale");
  check_single(kFunction, "sum_of_squares", args.sum_of_squares, at::kDouble, device, "inv_scale");
  check_optional(kFunction, "clip_coef", args.clip_coef, at::kFloat, device, "inv_scale");
  check_optional(kFunction, "total_norm", args.total_norm, at::kFloat, device, "inv_scale");
  TORCH_CHECK_VALUE(args.max_norm.has_value() == kernels::given(args.clip_coef), kFunction,
                    ": expected max_norm and clip_coef together, got ",
                    args.max_norm ? "max_norm" : "clip_coef", " alone");
  check_counts(kFunction, args.non_finite_counts, device, args.grads.size());
  check_gradients(kFunction, args.grads.slice(args.arrays.size()), args.arrays.size(), device,
                  /*written=*/false);
}

void norm_and_check_(at::TensorList grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
                     const at::Tensor& sum_of_squares,
                     const std::optional<at::Tensor>& non_finite_counts,
                     std::optional<double> max_norm, const std::optional<at::Tensor>& clip_coef,
                     const std::optional<at::Tensor>& total_norm, bool overwrite_found_inf) {
  call_op<NormAndCheck>({grads, inv_scale, found_inf, sum_of_squares, non_finite_counts, max_norm,
                         clip_coef, total_norm, overwrite_found_inf});
}

}  // namespace fastamp::ops
