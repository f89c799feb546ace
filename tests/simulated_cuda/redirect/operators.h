// SPDX-License-Identifier: Apache-2.0
#pragma once

// torch's operators on CUDA tensors, run by its kernels for the CPU over the same memory.
//
// Stands for: results, shapes, errors about devices, the stream's order, waits for what decides a
// shape, capture. An operator runs when it is called, after what its stream has waiting, in late
// mode too. Does not stand for: the bits of torch's kernels for CUDA, operators without a kernel
// for the CPU, sparse tensors in graphs.

#include <ATen/autocast_mode.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace simulated_cuda {

/// While one lives, calls on this thread are the device's own: nothing above kernels sees them.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView backend;
  c10::impl::ExcludeDispatchKeyGuard others{c10::autocast_dispatch_keyset |
                                            c10::DispatchKeySet(c10::DispatchKey::Tracer)};
};

/// The kernels that are registered for the key CUDA. Their types are the dispatcher's.
void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);
/// Convolutions of 16 bits, in fp32: those of the CPU take minutes.
void run_convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack);
void run_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Redirects the operators of libraries that were loaded since the last call (registration.cpp).
void redirect_newcomers();

/// Calls an operator so, on a stack of its arguments; returns its first result.
at::Tensor run_by_name(const char* name, torch::jit::Stack arguments);

}  // namespace simulated_cuda
