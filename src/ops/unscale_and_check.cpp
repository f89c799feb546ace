// SPDX-License-Identifier: Apache-2.0
#include "kernels/amp_args.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/amp_ops.h>

#include <tuple>

namespace fastamp::ops {
namespace {

struct UnscaleAndCheck {
  using Args = kernels::UnscaleArgs;
  static constexpr auto kName = "unscale_and_check_";
  static constexpr auto kArguments =
      std::tuple{FASTAMP_ARG(grads, Access::kWrite),
                 FASTAMP_ARG(inv_scale),
                 FASTAMP_ARG(found_inf, Access::kWrite),
                 FASTAMP_ARG(sum_of_squares, Access::kWrite),
                 FASTAMP_ARG(non_finite_counts, Access::kWrite),
                 FASTAMP_ARG(overwrite_found_inf, Access::kRead, "False")};
  static constexpr auto kCpu = kernels::unscale_and_check_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::unscale_and_check;

  static void check(const Args& args) { check_unscale(args); }
  static c10::Device device(const Args& args) { return args.inv_scale.device(); }
};

FASTAMP_REGISTER_OP(UnscaleAndCheck);

}  // namespace

void check_unscale(const kernels::UnscaleArgs& args) {
  constexpr auto kFunction = "unscale_and_check_";
  const auto device = check_first(kFunction, "inv_scale", args.inv_scale, at::kFloat);
  check_single(kFunction, "found_inf", args.found_inf, at::kFloat, device, "inv_scale");
  check_optional(kFunction, "sum_of_squares", args.sum_of_squares, at::kDouble, device,
                 "inv_scale");
  check_counts(kFunction, args.non_finite_counts, device, args.grads.size());
  check_gradients(kFunction, args.grads.slice(args.arrays.size()), args.arrays.size(), device,
                  /*written=*/true);
}

void unscale_and_check_(at::TensorList grads, const at::Tensor& inv_scale,
                        const at::Tensor& found_inf,
                        const std::optional<at::Tensor>& sum_of_squares,
                        const std::optional<at::Tensor>& non_finite_counts,
                        bool overwrite_found_inf) {
  call_op<UnscaleAndCheck>(
      {grads, inv_scale, found_inf, sum_of_squares, non_finite_counts, overwrite_found_inf});
}

}  // namespace fastamp::ops
