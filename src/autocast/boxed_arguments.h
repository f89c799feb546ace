// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

// Arguments of an op that is known only by its schema: which hold tensors, and what they become.
namespace fastamp::autocast {

using BoxedArguments = c10::ArrayRef<c10::IValue>;

/// Whether values of a type are or hold tensors.
bool holds_tensors(const c10::Type& type);

/// Whether replace_tensors() reaches all tensors of a type: those of keys, futures and the like it
/// does not, nor, of a type that may be anything, any.
bool reaches_all_tensors(const c10::Type& type);

/// Whether the dispatcher looks at an argument: an op with tensors in dicts only never comes here.
bool is_dispatched(const c10::Argument& argument);

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Calls `function` with every defined tensor of a value, those in lists, tuples and dicts too.
template <class Function>
void visit_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      function(value.toTensor());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      visit_tensors(element, function);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      visit_tensors(element, function);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      visit_tensors(entry.value(), function);
    }
  }
}

template <class Function>
void for_each_tensor(BoxedArguments arguments, const Function& function) {
  for (const auto& value : arguments) {
    visit_tensors(value, function);
  }
}

/// Returns what takes the place of a tensor; undefined if it stays.
using Replacement = c10::function_ref<at::Tensor(const at::Tensor&)>;

/// Returns a value with what takes the place of its tensors, those in lists, tuples and dicts too.
c10::IValue replace_tensors(const c10::IValue& value, Replacement replacement);

}  // namespace fastamp::autocast
