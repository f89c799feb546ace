// SPDX-License-Identifier: Apache-2.0
#include "float8/decision.h"

#include "core/interception.h"
#include "float8/exclusions.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstdint>

namespace fastamp::autocast {
namespace {

using c10::DispatchKey;

constexpr std::int64_t kSizeMultiple = 16;

/// Interceptors that pass on the ops they are given, or record them: whatever is done by ops alone
/// they see and can change. functorch and torch.jit's tracer are none of them.
constexpr c10::DispatchKeySet kPassOpsOn({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                                          DispatchKey::PythonDispatcher, DispatchKey::PreDispatch,
                                          DispatchKey::Functionalize});

/// The keys of plain tensors, and of those that stand for plain tensors.
constexpr c10::DispatchKeySet kTraced =
    c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                         DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                         DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}) |
    kPassOpsOn;

bool is_of_python_class(const at::Tensor& tensor) {
  return tensor.key_set().has(DispatchKey::Python);
}

std::atomic<const PythonTensors*> g_python_tensors{nullptr};

/// Python's answer about a tensor of a Python class: no for others, and without Python.
bool python_says(bool (*PythonTensors::*question)(const at::Tensor&), const at::Tensor& tensor) {
  const auto* functions = g_python_tensors.load(std::memory_order_acquire);
  return functions != nullptr && is_of_python_class(tensor) && (functions->*question)(tensor);
}

bool is_small(const Float8Shape& shape, const Float8Setting& setting, c10::DeviceType device) {
  const auto of_device = device == c10::kCUDA ? Float8Recipe::kSmallOnGpu : Float8Recipe::Size{};
  const auto [k, n] = setting.small_size.value_or(of_device);
  return shape.k <= k && shape.n <= n;
}

}  // namespace

bool is_float8_operand(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

Float8Outcome float8_outcome(const Float8Shape& shape, const Float8Setting& setting,
                             c10::DeviceType device) {
  if (!is_float8_operand(shape.x_dtype) || !is_float8_operand(shape.weight_dtype)) {
    return Float8Outcome::kDtype;
  }
  if (shape.m == 0 || shape.k == 0 || shape.n == 0) {
    return Float8Outcome::kEmpty;
  }
  if (shape.k % kSizeMultiple != 0 || shape.n % kSizeMultiple != 0) {
    return Float8Outcome::kShape;
  }
  return is_small(shape, setting, device) ? Float8Outcome::kSmall : Float8Outcome::kRan;
}

Float8Path float8_path(const at::Tensor& operand) {
  if (call_path(operand) != CallPath::kIntercepted) {
    return Float8Path::kKernels;
  }
  const auto keys = operand.key_set();
  const bool is_traced = (keys | kTraced) == kTraced && keys.has(DispatchKey::Dense) &&
                         !is_intercepted_except(kPassOpsOn) &&
                         !operand._fw_grad(/*level=*/0).defined();
  if (!is_traced) {
    return Float8Path::kBaseDtype;
  }
  const bool is_known =
      !is_of_python_class(operand) || python_says(&PythonTensors::is_traced, operand);
  return is_known ? Float8Path::kAten : Float8Path::kBaseDtype;
}

void set_python_tensors(const PythonTensors* functions) {
  g_python_tensors.store(functions, std::memory_order_release);
}

bool is_parameter_operand(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || tensor.is_leaf()) {
    return tensor.requires_grad();
  }
  return python_says(&PythonTensors::is_parameter, tensor);
}

bool is_excluded_operand(const at::Tensor& weight) {
  if (!are_weights_excluded_from_float8()) {
    return false;
  }
  // A plan excludes fake tensors themselves.
  return is_excluded_from_float8(weight) || python_says(&PythonTensors::is_excluded, weight);
}

}  // namespace fastamp::autocast
