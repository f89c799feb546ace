// SPDX-License-Identifier: Apache-2.0
#pragma once

// Not part of <fastamp/fastamp.h>: needs a LibTorch that was built with distributed support.
//
// Its packages have what this header includes. To make a group they also have to have what the
// header of a backend includes: ProcessGroupGloo.hpp needs gloo's own headers and
// ProcessGroupNCCL.hpp NCCL's, which LibTorch's wheels do not ship. Without them, or without c10d,
// write the lambda that <fastamp/scaler/agreement.h> shows.

#include <fastamp/scaler/agreement.h>

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>
#include <vector>

namespace fastamp {

/// Returns the agreement of all members of a group, one MAX all-reduce of one number; for
/// GradScalerOptions::agreement. Every member has to reach it. On CUDA with NCCL the host does not
/// wait. It shares the group.
/// @throws c10::ValueError if the group is null.
inline FlagAgreement agree_over(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  TORCH_CHECK_VALUE(group.defined(), "agree_over: expected a process group, got null");
  return [group = std::move(group)](const at::Tensor& found_inf) {
    std::vector<at::Tensor> flags{found_inf};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    group->allreduce(flags, options)->wait();
  };
}

}  // namespace fastamp
