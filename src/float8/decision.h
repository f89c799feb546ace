// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/recipe.h"
#include "trace/float8_outcome.h"

#include <fastamp/autocast/float8_plan.h>
#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

// Whether a product runs in fp8: its sizes and dtypes, the kinds of its tensors, and which
// interceptors of ops fp8 works with. Exported for the Python module; not part of the public API.
namespace fastamp::autocast {

/// Whether a tensor of this dtype can be an operand of a product in fp8.
bool is_float8_operand(c10::ScalarType dtype);

/// Decides what becomes of x times a weight of these sizes and dtypes on a device. No size but 0 of
/// m changes it.
Float8Outcome float8_outcome(const Float8Shape& shape, const Float8Setting& setting,
                             c10::DeviceType device);

/// Ways in which a product may run, as its operands and what intercepts its call allow. In this
/// order: the last one among the operands decides.
enum class Float8Path : std::uint8_t {
  kKernels,    ///< Plain tensors: casts by kernels of our own, and kept.
  kAten,       ///< A tracer or mode sees the ops: the same arithmetic by torch's ops alone.
  kBaseDtype,  ///< Not in fp8: functorch, tangents, other subclasses, sparse tensors, ...
};

Float8Path float8_path(const at::Tensor& operand);

/// Facts that only Python knows of tensors of Python classes. The functions take the GIL.
struct PythonTensors {
  /// Whether it stands for a plain tensor in a trace: a fake or functional tensor.
  bool (*is_traced)(const at::Tensor& tensor);
  /// Whether the tensor that it stands for is a leaf that requires a gradient. (A functional tensor
  /// that does itself never is a leaf.)
  bool (*is_parameter)(const at::Tensor& tensor);
  /// Whether the weight that it stands for is excluded from fp8.
  bool (*is_excluded)(const at::Tensor& tensor);
};

/// Set once by the Python module, while other threads may run ops; lives as long as the process.
/// Without it no such tensor is traced.
FASTAMP_API void set_python_tensors(const PythonTensors* functions);

/// Whether a tensor is a leaf that requires a gradient, also in a trace.
bool is_parameter_operand(const at::Tensor& tensor);

/// is_excluded_from_float8(), also of a tensor in a trace.
bool is_excluded_operand(const at::Tensor& weight);

}  // namespace fastamp::autocast
