// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <ATen/core/operator_name.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <unordered_set>

namespace fastamp::autocast {

/// Kernels on one device's autocast key for every op that has none, by which the op's calls follow
/// the policy of kEveryOp. They are gone with the object. Not thread-safe.
class UnifyKernels {
 public:
  explicit UnifyKernels(PolicyDevice device) : device_(device) { add_all(); }

  /// Reaches the ops that there are by now.
  void add_all();
  /// Reaches an op, if it is not reached yet.
  void add(const c10::OperatorName& name);
  /// Reaches an op of the table again: its own kernel has been put over fastamp's.
  void add_over(OpId op);

 private:
  PolicyDevice device_;
  std::map<std::string, torch::Library> libraries_;  ///< By namespace.
  std::unordered_set<c10::OperatorName> reached_;
};

}  // namespace fastamp::autocast
