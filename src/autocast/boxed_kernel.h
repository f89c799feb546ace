// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

namespace fastamp::autocast {

/// The autocast kernel of an op that is known only by its schema; OpKernel's counterpart.
class BoxedKernel final : public c10::OperatorKernel {
 public:
  BoxedKernel(OpId op, PolicyDevice device) : op_(op), device_(device) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const;

 private:
  OpId op_;
  PolicyDevice device_;
};

/// Runs an op that no policy is for as it is, unless its first argument is a nested tensor, whose
/// inner ops take no two dtypes: then all its arguments are cast to the region's dtype.
class NestedInputKernel final : public c10::OperatorKernel {
 public:
  explicit NestedInputKernel(PolicyDevice device) : device_(device) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const;

 private:
  PolicyDevice device_;
};

/// Says what the schema allows. An op that writes an argument cannot be given a cast of it, but
/// casts of the others: to its dtype.
OpCapabilities boxed_capabilities(const c10::FunctionSchema& schema);

}  // namespace fastamp::autocast
