// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastamp {

/// Recipe by which an autocast region runs products of linear layers in fp8: docs/float8.md.
///
/// @code
///   const fastamp::AutocastGuard region(
///       torch::kCUDA, fastamp::Float8Recipe().grad_dtype(torch::kFloat8_e4m3fn));
/// @endcode
///
/// A value, with LibTorch's kind of setters; it is checked where a region is made of it.
class Float8Recipe {
 public:
  /// Says for which of the three products of a linear layer the tensor cores of a Hopper GPU sum
  /// with fewer bits: y, dX, dW. No effect elsewhere.
  using FastAccumulate = std::array<bool, 3>;

  /// Format of activations and weights.
  Float8Recipe& forward_dtype(c10::ScalarType dtype) {
    forward_dtype_ = dtype;
    return *this;
  }
  c10::ScalarType forward_dtype() const noexcept { return forward_dtype_; }

  /// Format of the gradients of outputs: float8_e5m2 has their range, float8_e4m3fn one more bit.
  Float8Recipe& grad_dtype(c10::ScalarType dtype) {
    grad_dtype_ = dtype;
    return *this;
  }
  c10::ScalarType grad_dtype() const noexcept { return grad_dtype_; }

  Float8Recipe& fast_accumulate(FastAccumulate products) {
    fast_accumulate_ = products;
    return *this;
  }
  const FastAccumulate& fast_accumulate() const noexcept { return fast_accumulate_; }

  /// The ops that may run in fp8, of "linear", "addmm", "mm" and "matmul".
  Float8Recipe& ops(std::vector<std::string> names) {
    ops_ = std::move(names);
    return *this;
  }
  const std::vector<std::string>& ops() const noexcept { return ops_; }

  /// K and N, the sizes of a weight: where both are at most these, the product stays in the
  /// base dtype, since casting costs more than fp8 saves.
  using Size = std::array<std::int64_t, 2>;
  Float8Recipe& small_size(std::int64_t k, std::int64_t n) {
    small_size_ = {k, n};
    return *this;
  }
  /// Unset: kSmallOnGpu on a GPU; on the CPU, where fp8 is a reference, no product is small.
  const std::optional<Size>& small_size() const noexcept { return small_size_; }

  /// Sizes that torchao leaves out: see docs/float8.md.
  static constexpr Size kSmallOnGpu{4096, 1024};

 private:
  c10::ScalarType forward_dtype_ = c10::ScalarType::Float8_e4m3fn;
  c10::ScalarType grad_dtype_ = c10::ScalarType::Float8_e5m2;
  FastAccumulate fast_accumulate_{true, false, false};
  std::vector<std::string> ops_{"linear", "addmm", "mm", "matmul"};
  std::optional<Size> small_size_;
};

/// The recipe that ops on a device follow now, on this thread; none outside fp8 regions, and where
/// one is suspended: by a region of another dtype inside it, or by one that is off.
FASTAMP_API std::optional<Float8Recipe> float8_recipe(c10::DeviceType device);

/// Keeps products of some weights out of fp8, in all regions of the process, for as long as it
/// lives. For the head of a model, which loses the most. Holds the weights weakly. Thread-safe.
class FASTAMP_API Float8ExclusionGuard {
 public:
  /// @param weights  For example lm_head->parameters().
  explicit Float8ExclusionGuard(const std::vector<at::Tensor>& weights);
  ~Float8ExclusionGuard() { release(); }

  Float8ExclusionGuard(const Float8ExclusionGuard&) = delete;
  Float8ExclusionGuard& operator=(const Float8ExclusionGuard&) = delete;
  Float8ExclusionGuard(Float8ExclusionGuard&&) = delete;
  Float8ExclusionGuard& operator=(Float8ExclusionGuard&&) = delete;

  /// Ends it early. Does nothing the second time.
  void release() noexcept;

 private:
  std::uint64_t id_;
};

}  // namespace fastamp
