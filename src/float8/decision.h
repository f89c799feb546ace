// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

// What kinds of tensors, and which interceptors of ops, fp8 works with. Exported for the Python
// module; not part of the public API.
namespace fastamp::autocast {

/// How a product may run, as its operands and what intercepts its call allow. In this order: the
/// last one among the operands decides.
enum class Float8Path : std::uint8_t {
  kernels,  ///< Plain tensors: casts by kernels of our own, and kept.
  aten,     ///< A tracer or mode sees the ops: the same arithmetic by torch's ops alone.
  carrier,  ///< Not in fp8: functorch, tangents, other subclasses, sparse and nested tensors, ...
};

Float8Path float8_path(const at::Tensor& operand);

/// What only Python can tell of tensors of Python classes. The functions take the GIL.
struct PythonTensors {
  /// Whether it stands for a plain tensor in a trace: a fake or functional tensor.
  bool (*is_traced)(const at::Tensor& tensor);
  /// Whether the tensor that it stands for is a leaf that requires a gradient. (A functional tensor
  /// that does itself never is a leaf.)
  bool (*is_parameter)(const at::Tensor& tensor);
  /// Whether the weight that it stands for is excluded from fp8.
  bool (*is_excluded)(const at::Tensor& tensor);
};

/// Set once by the Python module, whose functions live as long as the process. Without them no
/// such tensor is traced.
FASTAMP_API void set_python_tensors(PythonTensors functions);

/// Whether a tensor is a leaf that requires a gradient, also in a trace.
bool is_parameter_operand(const at::Tensor& tensor);

/// is_excluded_from_float8(), also of a tensor in a trace.
bool is_excluded_operand(const at::Tensor& weight);

}  // namespace fastamp::autocast
