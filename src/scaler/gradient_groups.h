#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastamp::scaler {

/// The non-finite flag of the gradients that live on one device.
struct DeviceFlag {
  c10::Device device;
  at::Tensor found_inf;
};

/// The gradients that live on one device, in the order in which they were collected.
struct DeviceGradients {
  c10::Device device;
  std::vector<at::Tensor> gradients;
  std::vector<std::uint32_t> positions;  ///< Which parameter each belongs to, counted from 0.
  bool any_double = false;               ///< Whether one is fp64.
  bool any_duplicates = false;           ///< Whether one holds values that are still to be added.
};

/// Unscales by torch's operator, which takes one dtype per call: devices that we have no kernels
/// for keep working through it.
FASTAMP_API void unscale_with_torch(std::vector<at::Tensor> gradients, const at::Tensor& inv_scale,
                                    at::Tensor& found_inf);

/// The gradients of one unscale call, sorted by device while they are collected.
///
/// Collecting only reads; everything that can be refused is refused before unscale_() writes. The
/// hot path is add(): real models repeat one (keys, dtype, device) for nearly every parameter, so a
/// gradient like its predecessor costs three compares and a refcount.
/// Not thread-safe; holds a reference to every gradient until it is destroyed.
class FASTAMP_API GradientGroups {
 public:
  enum class Taken : std::uint8_t {
    kYes,      ///< Collected, or there is no gradient.
    kForeign,  ///< The gradient is a Python tensor subclass: its own code must unscale it.
  };

  explicit GradientGroups(bool allow_fp16) : allow_fp16_(allow_fp16) {}

  /// Collects the gradient of a plain leaf tensor.
  /// @throws c10::ValueError for an fp16 gradient unless they are allowed.
  Taken add(const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
    if (!gradient.defined()) {
      skip();
      return Taken::kYes;
    }
    return add(parameter, gradient);
  }

  /// Counts a parameter whose gradient is not collected: there is none, or others handle it.
  void skip() { ++parameters_; }

  /// The same for a gradient that was already read. A sparse fp16 gradient is coalesced by
  /// unscale_(), which then stores the result as parameter's gradient.
  Taken add(const at::Tensor& parameter, const at::Tensor& gradient) {
    const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    const auto position = parameters_++;
    if (last_ != nullptr && impl->key_set() == last_keys_ &&
        gradient.scalar_type() == last_dtype_ && impl->device() == last_->device) [[likely]] {
      last_->gradients.push_back(gradient);
      last_->positions.push_back(position);
      return Taken::kYes;
    }
    return add_other(parameter, gradient, position);
  }

  /// Makes room for a number of gradients in the next group that is opened.
  void reserve(std::size_t count) { expected_ = count; }

  /// Coalesces all sparse gradients, not just those of fp16: needed where their norm is.
  void coalesce_sparse() { coalesce_all_ = true; }

  /// Multiplies every collected gradient by `inv_scale` in place and returns, per device met, a
  /// copy of `found_inf` that is non-zero if a gradient there was inf or NaN.
  /// Gradient history is not recorded. Asynchronous on CUDA.
  std::vector<DeviceFlag> unscale_(const at::Tensor& inv_scale, const at::Tensor& found_inf);

  /// Gives away what was collected: the values of sparse gradients among the dense ones. Coalesces
  /// sparse fp16 gradients, in the parameters too. The object is empty afterwards.
  std::vector<DeviceGradients> release();

 private:
  struct SparseGradient {
    at::Tensor parameter;
    at::Tensor gradient;
    std::uint32_t position;
  };

  Taken add_other(const at::Tensor& parameter, const at::Tensor& gradient, std::uint32_t position);
  DeviceGradients& group_for(c10::Device device);
  void push(const at::Tensor& gradient, std::uint32_t position);
  void take_sparse_values();

  bool allow_fp16_;
  bool coalesce_all_ = false;
  std::size_t expected_ = 0;
  std::uint32_t parameters_ = 0;
  std::vector<DeviceGradients> groups_;
  std::vector<SparseGradient> sparse_;
  DeviceGradients* last_ = nullptr;
  c10::DispatchKeySet last_keys_;
  c10::ScalarType last_dtype_ = c10::ScalarType::Undefined;
};

}  // namespace fastamp::scaler
