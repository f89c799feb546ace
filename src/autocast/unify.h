// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <exception>

// The policy "unify": a call runs as it is, and only if the op refuses it is it repeated with its
// floating-point arguments in one dtype.
namespace fastamp::autocast {

/// Whether calls of an op can be given casts: it takes two tensors at least, and writes none in
/// lists.
bool can_unify(const c10::FunctionSchema& schema);

/// Runs the op on the arguments on the stack. Called by autocast kernels of ops under "unify".
/// @param below  The keys that are left of the call, those of autocast not among them.
/// @throws What the op threw at first, if it refuses all casts, too.
void call_unified(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                  torch::jit::Stack* stack, PolicyDevice device);

/// Says whether an exception that is none of c10's may be an op's refusal of its arguments, and
/// makes it safe to run other code before it is thrown again. Set by the Python module, whose
/// exceptions may be interrupts and lie in the interpreter. Without it, all may be.
using RefusalReader = bool (*)(std::exception& error);
FASTAMP_API void set_refusal_reader(RefusalReader reader);

/// Returns a tensor with values for one without, of a call that a compiler records, and a copy of
/// one that has values; undefined if the call is not recorded or that is impossible. Called while
/// modes are active. Set by the Python module: such tensors are Python's.
using StandInMaker = at::Tensor (*)(const at::Tensor& recorded);
FASTAMP_API void set_stand_in_maker(StandInMaker maker);

}  // namespace fastamp::autocast
