// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

// torch's public autocast state, as programs see and set it without fastamp. <ATen/autocast_mode.h>
// costs 10 s of compile time, so that it is included in one file only.
namespace fastamp::test {

/// What torch says about autocast on the calling thread.
struct PublicState {
  bool cpu_enabled;
  bool cuda_enabled;
  c10::ScalarType cpu_dtype;
  c10::ScalarType cuda_dtype;
  bool cache_enabled;
  int depth;

  bool operator==(const PublicState&) const = default;
};

PublicState public_state();
void set_enabled(c10::DeviceType device, bool enabled);
void set_dtype(c10::DeviceType device, c10::ScalarType dtype);
void set_cache_enabled(bool enabled);
int increment_nesting();
int decrement_nesting();
void clear_torch_cache();

/// A region as C++ programs write it by hand today, with no class of fastamp's.
class HandRegion {
 public:
  HandRegion(c10::DeviceType device, c10::ScalarType dtype, bool enabled = true);
  ~HandRegion();
  HandRegion(const HandRegion&) = delete;
  HandRegion& operator=(const HandRegion&) = delete;

 private:
  c10::DeviceType device_;
  c10::ScalarType dtype_;
  bool enabled_;
};

/// Fails the test if the thread's autocast state, the set of edited policies or the registration is
/// not left as it was found. Derive test cases from it: TEST_CASE_METHOD(LeavesNoTrace, ...).
class LeavesNoTrace {
 public:
  LeavesNoTrace();
  ~LeavesNoTrace();
  LeavesNoTrace(const LeavesNoTrace&) = delete;
  LeavesNoTrace& operator=(const LeavesNoTrace&) = delete;

 private:
  PublicState found_;
};

/// Runs `function` under torch's own kernels in a hand-written region: the reference for parity.
template <class Function>
auto with_torch_kernels(c10::DeviceType device, c10::ScalarType dtype, Function&& function);

/// Uninstalls fastamp's kernels for as long as it lives.
class TorchKernels {
 public:
  TorchKernels();
  ~TorchKernels();
  TorchKernels(const TorchKernels&) = delete;
  TorchKernels& operator=(const TorchKernels&) = delete;
};

template <class Function>
auto with_torch_kernels(c10::DeviceType device, c10::ScalarType dtype, Function&& function) {
  const TorchKernels kernels;
  const HandRegion region(device, dtype);
  return function();
}

/// Same dtype, shape and bits; NaN equals the same NaN.
bool bit_equal(const at::Tensor& a, const at::Tensor& b);

}  // namespace fastamp::test
