// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast.h"
#include "autocast/op_table.h"
#include "autocast/weight_aliases.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// How each argument type of an op is cast, promoted and inspected. Types that hold no tensors pass
// through.
namespace fastamp::autocast {

/// Casts the arguments of one op call.
struct Caster {
  c10::ScalarType to;
  c10::ScalarType lower;
  PolicyDevice device;
  bool share = false;  ///< See cast().

  bool wants(const at::Tensor& tensor) const { return needs_cast(tensor, to, device); }

  /// Returns what takes the place of an argument; undefined if it stays.
  at::Tensor operator()(const at::Tensor& tensor) const {
    if (wants(tensor)) {
      return cast(tensor, to, lower, share);
    }
    const bool may_be_low_precision =
        has_low_precision_weights() && to == lower && tensor.defined();
    return may_be_low_precision ? alias_of_low_precision_weight(tensor, lower) : at::Tensor();
  }
};

/// A copy of a list with what takes the place of its tensors; empty if all stay.
template <class List>
std::vector<at::Tensor> cast_list(const List& tensors, const Caster& caster) {
  std::vector<at::Tensor> out;
  std::size_t position = 0;
  for (const at::Tensor& tensor : tensors) {
    at::Tensor cast = caster(tensor);
    if (cast.defined()) {
      if (out.empty()) {
        out.assign(tensors.begin(), tensors.end());
      }
      out[position] = std::move(cast);
    }
    ++position;
  }
  return out;
}

/// An argument as the kernel received it, and what is to be done with it.
template <class T>
struct Received {
  std::remove_reference_t<T>& value;
  const Caster& caster;
};

/// Holds one argument for the duration of the call: borrowed if it needs no cast, so that the
/// common case touches no reference count. Made in place from a Received, never moved.
template <class T>
class Argument {
 public:
  static constexpr bool kHoldsTensors = false;
  explicit Argument(Received<T> received) : value_(received.value) {}
  T get() { return static_cast<T&&>(value_); }

 private:
  std::remove_reference_t<T>& value_;
};

template <>
class Argument<const at::Tensor&> {
 public:
  static constexpr bool kHoldsTensors = true;
  explicit Argument(Received<const at::Tensor&> received)
      : given_(received.value), cast_(received.caster(given_)) {}
  const at::Tensor& get() const { return cast_.defined() ? cast_ : given_; }

 private:
  const at::Tensor& given_;
  at::Tensor cast_;
};

template <>
class Argument<const std::optional<at::Tensor>&> {
 public:
  static constexpr bool kHoldsTensors = true;
  explicit Argument(Received<const std::optional<at::Tensor>&> received) : given_(received.value) {
    if (given_.has_value()) {
      if (at::Tensor cast = received.caster(*given_); cast.defined()) {
        cast_ = std::move(cast);
      }
    }
  }
  const std::optional<at::Tensor>& get() const { return cast_.has_value() ? cast_ : given_; }

 private:
  const std::optional<at::Tensor>& given_;
  std::optional<at::Tensor> cast_;
};

/// A list is copied only if one of its tensors needs a cast.
template <class List>
class ListArgument {
 public:
  static constexpr bool kHoldsTensors = true;
  ListArgument(const List& given, const Caster& caster)
      : cast_(cast_list(given, caster)), list_(cast_.empty() ? given : List(cast_)) {}
  const List& get() const { return list_; }

 private:
  std::vector<at::Tensor> cast_;
  List list_;
};

template <>
class Argument<at::TensorList> : public ListArgument<at::TensorList> {
 public:
  explicit Argument(Received<at::TensorList> received)
      : ListArgument(received.value, received.caster) {}
};

template <>
class Argument<const at::ITensorListRef&> : public ListArgument<at::ITensorListRef> {
 public:
  explicit Argument(Received<const at::ITensorListRef&> received)
      : ListArgument(received.value, received.caster) {}
};

/// Whether an argument holds a tensor that forces a promoting op into float32: any castable dtype
/// but `lower`. torch stops with an error at a mix of float16 and bfloat16; float32 holds both
/// exactly.
inline bool forces_fp32(const at::Tensor& tensor, c10::ScalarType lower, PolicyDevice device) {
  return needs_cast(tensor, lower, device);
}

template <class T>
bool forces_fp32(const T& argument, c10::ScalarType lower, PolicyDevice device) {
  if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument.has_value() && forces_fp32(*argument, lower, device);
  } else if constexpr (std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>) {
    for (const at::Tensor& tensor : argument) {
      if (forces_fp32(tensor, lower, device)) {
        return true;
      }
    }
  }
  return false;
}

/// Whether a tensor is sparse, in coordinates or compressed.
inline bool is_sparse(const at::Tensor& tensor) {
  constexpr std::array kLayouts{c10::kSparse, c10::kSparseCsr, c10::kSparseCsc, c10::kSparseBsr,
                                c10::kSparseBsc};
  return tensor.defined() && std::ranges::find(kLayouts, tensor.layout()) != kLayouts.end();
}

/// Whether an argument holds a tensor that is.
template <class T>
bool holds_sparse(const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return is_sparse(argument);
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument.has_value() && is_sparse(*argument);
  } else if constexpr (std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>) {
    for (const at::Tensor& tensor : argument) {
      if (is_sparse(tensor)) {
        return true;
      }
    }
  }
  return false;
}

/// Sets an absent dtype argument to float32; every other argument is handed on as it is.
template <class T>
decltype(auto) with_default_dtype(std::remove_reference_t<T>& argument) {
  if constexpr (std::is_same_v<std::decay_t<T>, std::optional<c10::ScalarType>>) {
    return argument.has_value() ? argument : std::optional<c10::ScalarType>(c10::kFloat);
  } else {
    return static_cast<T&&>(argument);
  }
}

}  // namespace fastamp::autocast
