// SPDX-License-Identifier: Apache-2.0
#include "kernels/exponents.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/exponents.h>

#include <tuple>

namespace fastamp::ops {
namespace {

void check_counted(const char* fn, const at::Tensor& t, std::size_t index, c10::Device device) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected tensors[", index,
                    "] to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, fn, ": expected tensors[", index,
                    "] to be strided, got layout ", t.layout());
  const auto dtype = t.scalar_type();
  TORCH_CHECK_TYPE(kernels::is_gradient_dtype(dtype) && dtype != at::kDouble, fn,
                   ": expected tensors[", index, "] to be Half, BFloat16 or Float, got ", dtype);
  TORCH_CHECK_VALUE(t.device() == device, fn, ": expected tensors[", index, "] on ", device,
                    ", the device of exponents, got ", t.device());
}

struct CountExponents {
  using Args = kernels::ExponentArgs;
  static constexpr auto kName = "count_exponents_";
  static constexpr auto kArguments =
      std::tuple{FASTAMP_ARG(tensors), FASTAMP_ARG(exponents, Access::kWrite),
                 FASTAMP_ARG(zeros, Access::kWrite), FASTAMP_ARG(every, Access::kRead, "1"),
                 FASTAMP_ARG(phase, Access::kRead, "0")};
  static constexpr auto kCpu = kernels::count_exponents_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::count_exponents;

  static void check(const Args& args) {
    constexpr auto kFunction = "count_exponents_";
    TORCH_CHECK_VALUE(args.exponents.defined(), kFunction,
                      ": expected exponents to be a tensor, got an undefined one");
    const auto device = args.exponents.device();
    const auto listed = static_cast<std::int64_t>(args.tensors.size());
    const bool together = args.exponents.dim() == 2 && args.exponents.sym_size(0) == 1;
    check_table(kFunction, "exponents", args.exponents, at::kLong, device, together ? 1 : listed,
                kernels::kExponentColumns);
    check_table(kFunction, "zeros", args.zeros, at::kLong, device, listed, 1);
    TORCH_CHECK_VALUE(args.every >= 1, kFunction, ": expected every >= 1, got ", args.every);
    TORCH_CHECK_VALUE(args.phase >= 0 && args.phase < args.every, kFunction,
                      ": expected phase in [0, every), which is ", args.every, ", got ",
                      args.phase);
    for (std::size_t i = args.arrays.size(); i < args.tensors.size(); ++i) {
      check_counted(kFunction, args.tensors[i], i, device);
    }
  }
  static c10::Device device(const Args& args) { return args.exponents.device(); }
};

FASTAMP_REGISTER_OP(CountExponents);

}  // namespace

void count_exponents_(at::TensorList tensors, const at::Tensor& exponents,
                      const std::optional<at::Tensor>& zeros, int64_t every, int64_t phase) {
  call_op<CountExponents>({tensors, exponents, zeros, every, phase});
}

}  // namespace fastamp::ops
