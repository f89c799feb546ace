// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/tensor_lists.h"
#include "kernels/host_array.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace fastamp::scaler {

/// The gradients that live on one device, in the order in which they were collected.
struct DeviceGradients {
  c10::Device device;
  std::vector<at::Tensor> gradients;
  std::vector<std::uint32_t> positions;  ///< Which parameter each belongs to, counted from 0.
  bool any_double = false;               ///< Whether one is fp64.
  bool any_functional = false;           ///< Whether one is wrapped by functionalization.
  bool any_duplicates = false;           ///< Whether one holds values that are still to be added.
  /// Where each is, for a CPU kernel that is called before any other code runs; empty unless asked
  /// for and all are dense arrays of host memory.
  std::vector<kernels::HostArray> arrays;
  bool as_arrays = false;  ///< While collecting: none was met that is no array.
};

/// Whether our kernels can read these without writing them.
FASTAMP_API bool has_checks(const DeviceGradients& gradients);

/// Unscales by torch's operator, which takes one dtype per call and checks what it reads; a second
/// call checks what was written. Devices that we have no kernels for keep working through it.
FASTAMP_API void unscale_with_torch(std::vector<at::Tensor> gradients, const at::Tensor& inv_scale,
                                    at::Tensor& found_inf);

/// Purpose for which the gradients of an optimizer are gathered for.
enum class Purpose : std::uint8_t {
  kUnscale,   ///< A pass that writes them comes next, and uses addresses; fp16 ones are refused.
  kCheck,     ///< A pass that reads them comes next, and uses addresses.
  kNorm,      ///< Their norm: sparse ones are replaced by their coalesced form.
  kMultiply,  ///< Any operator.
};

/// The gradients of an optimizer, as a front end hands them to ScalerCore.
struct Gathered {
  std::vector<DeviceGradients> groups;
  /// Multiplies the others, which are Python tensor subclasses; empty if the core may go on with
  /// all of them.
  std::function<void(const at::Tensor& factor)> multiply_foreign;
  /// Two parameters have one gradient: a step that writes gradients would write it twice.
  bool shared = false;
  /// The groups have every gradient, each once and at the position of its parameter.
  bool by_position = false;

  bool has_foreign() const { return multiply_foreign != nullptr; }
};

/// The gradients of one unscale call, sorted by device while they are collected.
///
/// Collecting only reads; everything that can be refused is refused before anything is written. A
/// gradient that comes twice, because its parameter is listed twice or shares it with another, is
/// collected once, at its first position.
/// Real models repeat one (keys, dtype, device) for nearly every parameter, so a gradient like its
/// predecessor costs three compares and a refcount. Not thread-safe; holds a reference to every
/// gradient until it is destroyed.
class FASTAMP_API GradientGroups {
 public:
  enum class Taken : std::uint8_t {
    kYes,      ///< Collected, or there is no gradient.
    kForeign,  ///< The gradient is a Python tensor subclass: its own code must unscale it.
  };

  explicit GradientGroups(Purpose purpose)
      : allow_fp16_(purpose != Purpose::kUnscale),
        wants_pass_(purpose == Purpose::kUnscale || purpose == Purpose::kCheck),
        wants_arrays_(wants_pass_),
        coalesce_all_(purpose == Purpose::kNorm) {}

  /// The parameters that add_block() takes at a time: few enough for the first cache level to hold
  /// what is read of them and many enough to wait for all at once.
  static constexpr std::size_t kBlock = 32;

  /// Collects the gradients of up to kBlock plain leaf tensors. Returns a bit for each whose
  /// gradient is a Python tensor subclass.
  /// @throws c10::ValueError for an fp16 gradient unless they are allowed.
  /// @throws c10::NotImplementedError if a pass comes next and a gradient is nested, CSR or mkldnn.
  std::uint32_t add_block(c10::ArrayRef<c10::TensorImpl*> parameters);

  /// Adds any number of them. False if a gradient is a Python tensor subclass; what was
  /// collected is of no use then.
  bool add_all(at::TensorList parameters);

  /// Counts a parameter whose gradient is not collected: there is none, or others handle it.
  void skip() { ++parameters_; }

  /// Collects one gradient that was already read. A sparse fp16 gradient is coalesced by release(),
  /// which then stores the result as parameter's gradient.
  Taken add(const at::Tensor& parameter, const at::Tensor& gradient) {
    const auto position = parameters_++;
    return add_like_last(gradient, position) ? Taken::kYes
                                             : add_other(parameter, gradient, position);
  }

  /// Makes room for a number of gradients in the next group that is opened.
  void reserve(std::size_t count) { expected_ = count; }

  /// Collects a gradient as often as it comes.
  void keep_repeats() { keeps_repeats_ = true; }
  /// Whether one came more than once.
  bool any_repeats() const { return any_repeats_; }
  /// Whether release() will give every gradient, each once and at the position of its parameter:
  /// none is sparse, and no code of others has run, such as that of a subclass's property.
  bool by_position() const { return wants_arrays_ && sparse_.empty() && !any_repeats_; }

  /// Coalesces all sparse gradients, not just those of fp16: needed where their norm is.
  void coalesce_sparse() { coalesce_all_ = true; }

  /// Keeps no addresses. Call it before code of others runs ahead of the pass: it may change
  /// tensors, so that none of their addresses must be used. None are collected from then on.
  void give_up_addresses() { wants_arrays_ = false; }

  /// Gives away what was collected: the values of sparse gradients among the dense ones. Coalesces
  /// sparse fp16 gradients, in the parameters too. The object is empty afterwards.
  std::vector<DeviceGradients> release();

 private:
  struct SparseGradient {
    at::Tensor parameter;
    at::Tensor gradient;
    std::uint32_t position;
    bool repeats = false;  ///< Another parameter's, or the same one's, that came before.
  };

  bool add_like_last(const at::Tensor& gradient, std::uint32_t position) {
    const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    if (last_ == nullptr || impl->key_set() != last_keys_ ||
        gradient.scalar_type() != last_dtype_ || impl->device() != last_->device) [[unlikely]] {
      return false;
    }
    if (comes_again(gradient)) [[unlikely]] {
      return true;
    }
    last_->gradients.push_back(gradient);
    last_->positions.push_back(position);
    return true;
  }
  bool comes_again(const at::Tensor& gradient) {
    const bool again = finder_.comes_again(gradient, gradient.unsafeGetTensorImpl(),
                                           [this](PointerSet& known) { insert_all(known); });
    any_repeats_ = any_repeats_ || again;
    return again && !keeps_repeats_;
  }
  void insert_all(PointerSet& known) const;
  Taken add_other(const at::Tensor& parameter, const at::Tensor& gradient, std::uint32_t position);
  void take_arrays(DeviceGradients& group) const;
  DeviceGradients& group_for(c10::Device device);
  void push(const at::Tensor& gradient, std::uint32_t position);
  void take_sparse_values();

  bool allow_fp16_;
  bool wants_pass_;
  bool wants_arrays_;
  bool coalesce_all_;
  bool keeps_repeats_ = false;
  bool any_repeats_ = false;
  std::size_t expected_ = 0;
  std::uint32_t parameters_ = 0;
  std::vector<DeviceGradients> groups_;
  std::vector<SparseGradient> sparse_;
  RepeatFinder finder_;
  DeviceGradients* last_ = nullptr;
  c10::DispatchKeySet last_keys_;
  c10::ScalarType last_dtype_ = c10::ScalarType::Undefined;
};

}  // namespace fastamp::scaler
