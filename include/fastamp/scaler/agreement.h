// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastamp {

/// Makes an overflow flag the same on all ranks: whatever overflows on one is skipped on all.
///
/// GradScaler calls it once for each optimizer and iteration, whatever gradients the rank holds
/// (and again if gradients were edited after a clip that waits for the step), with an fp32 scalar
/// on the device of the scale that is not 0 if this rank overflowed. It has to leave there, in
/// place, something that is not 0 on every rank if it was not 0 on any. On CUDA it should enqueue
/// its work on the current stream and not wait for it. What it throws passes through the call on
/// the scaler.
///
/// agree_over() in <fastamp/scaler/process_group.h> makes one of a c10d::ProcessGroup. Whoever has
/// no such group, because LibTorch does not carry the headers of gloo and NCCL that its backends
/// are made with, writes a lambda, over MPI:
///
/// @code
///   options.agreement([](const at::Tensor& found_inf) {
///     float flag = found_inf.item<float>();
///     MPI_Allreduce(MPI_IN_PLACE, &flag, 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
///     found_inf.fill_(flag);
///   });
/// @endcode
///
/// or over a c10d::TCPStore, whose header is in every package, `ranks` being the number of
/// processes:
///
/// @code
///   options.agreement([store, ranks, round = 0](const at::Tensor& found_inf) mutable {
///     const auto key = "overflow/" + std::to_string(round++);
///     const bool overflow = found_inf.item<float>() != 0.0F;
///     store->add(key + "/seen", overflow ? 1 : 0);
///     if (store->add(key + "/ranks", 1) == ranks) {
///       store->set(key + "/done", std::vector<uint8_t>{1});
///     }
///     store->wait({key + "/done"});
///     found_inf.fill_(store->add(key + "/seen", 0) > 0 ? 1.0 : 0.0);
///   });
/// @endcode
///
/// Both wait for the device at each step; a group of NCCL does not.
using FlagAgreement = std::function<void(const at::Tensor& found_inf)>;

}  // namespace fastamp
