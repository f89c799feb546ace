// SPDX-License-Identifier: Apache-2.0
// Included by four sources that CMake writes, ops_<n>.cpp, each of which compiles the kernels of
// every fourth op: the op table is one file, but the compile time is spread over the cores.
#ifndef FASTAMP_OPS_PART
#error "define FASTAMP_OPS_PART (0 to 3) before including instantiate_ops.h"
#endif

#include "autocast/batch_norm.h"
#include "autocast/op_kernel.h"
#include "autocast/op_table.h"
#include "autocast/rnn.h"

#include <ATen/Operators.h>

// Included once per part, as a source is.
// NOLINTBEGIN(misc-anonymous-namespace-in-header, misc-definitions-in-headers)
namespace fastamp::autocast {
namespace {

/// A template, so that the branch not taken never instantiates the kernel.
template <OpId kOp, class Op, template <class> class MakeKernel>
void fill(std::array<KernelEntry, kNumOps>& entries) {
  if constexpr (part_of(kOp) == FASTAMP_OPS_PART) {
    using Kernel = MakeKernel<Op>::type;
    entries[static_cast<std::size_t>(kOp)] = {Op::name, Op::overload_name, Kernel::kCapabilities,
                                              &Kernel::implement};
  }
}

template <OpId kOp, class Redispatch>
struct Generated {
  template <class Op>
  struct Kernel {
    using type = OpKernel<Op, kOp, Redispatch, typename Op::schema>;
  };
};

template <class CustomKernel>
struct Custom {
  template <class Op>
  struct Kernel {
    using type = CustomKernel;
  };
};

}  // namespace

template <>
void fill_kernel_entries<FASTAMP_OPS_PART>(std::array<KernelEntry, kNumOps>& entries) {
#define FASTAMP_OP(op, cpu, cuda) \
  fill<OpId::op, at::_ops::op, Generated<OpId::op, NoRedispatch>::Kernel>(entries);
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) \
  fill<OpId::op, at::_ops::op, Generated<OpId::op, at::_ops::redispatch>::Kernel>(entries);
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, CustomKernel) \
  fill<OpId::op, at::_ops::op, Custom<CustomKernel>::Kernel>(entries);
#include "autocast/torch_op_table.inc"
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
}

}  // namespace fastamp::autocast
// NOLINTEND(misc-anonymous-namespace-in-header, misc-definitions-in-headers)
