// SPDX-License-Identifier: Apache-2.0
#include "autocast/boxed_arguments.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fastamp::autocast {

bool holds_tensors(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         std::ranges::any_of(type.containedTypes(), [](const c10::TypePtr& inner) {
           return inner != nullptr && holds_tensors(*inner);
         });
}

bool reaches_all_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::AnyType:
      return false;
    case c10::TypeKind::DictType:
      return !holds_tensors(*type.containedTypes()[0]) &&
             reaches_all_tensors(*type.containedTypes()[1]);
    case c10::TypeKind::ListType:
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::TensorType:
    case c10::TypeKind::TupleType:
      return std::ranges::all_of(type.containedTypes(), [](const c10::TypePtr& inner) {
        return reaches_all_tensors(*inner);
      });
    default:
      return !holds_tensors(type);
  }
}

bool is_dispatched(const c10::Argument& argument) {
  const auto& type = *argument.type();
  return type.isSubtypeOf(*c10::TensorType::get()) ||
         type.isSubtypeOf(*c10::OptionalType::ofTensor()) ||
         type.isSubtypeOf(*c10::ListType::ofTensors()) ||
         type.isSubtypeOf(*c10::ListType::ofOptionalTensors());
}

c10::IValue replace_tensors(const c10::IValue& value, Replacement replacement) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    at::Tensor other = tensor.defined() ? replacement(tensor) : at::Tensor();
    return other.defined() ? c10::IValue(std::move(other)) : value;
  }
  if (value.isList()) {
    c10::impl::GenericList out(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) {
      out.push_back(replace_tensors(element, replacement));
    }
    return out;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> out;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      out.push_back(replace_tensors(element, replacement));
    }
    return c10::ivalue::Tuple::create(std::move(out));
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict out(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      out.insert(entry.key(), replace_tensors(entry.value(), replacement));
    }
    return out;
  }
  return value;
}

}  // namespace fastamp::autocast
