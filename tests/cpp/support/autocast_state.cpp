// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"

#include "support/catch.h"

#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/registration.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/contiguous.h>

#include <cstring>

namespace fastamp::test {
namespace {

bool policies_are_default() {
  for (const auto& row : op_table()) {
    if (row.cpu != row.cpu_default || row.cuda != row.cuda_default) {
      return false;
    }
  }
  return true;
}

}  // namespace

PublicState public_state() {
  const int depth = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  return {
      at::autocast::is_autocast_enabled(c10::kCPU), at::autocast::is_autocast_enabled(c10::kCUDA),
      at::autocast::get_autocast_dtype(c10::kCPU),  at::autocast::get_autocast_dtype(c10::kCUDA),
      at::autocast::is_autocast_cache_enabled(),    depth};
}

void set_enabled(c10::DeviceType device, bool enabled) {
  at::autocast::set_autocast_enabled(device, enabled);
}
void set_dtype(c10::DeviceType device, c10::ScalarType dtype) {
  at::autocast::set_autocast_dtype(device, dtype);
}
void set_cache_enabled(bool enabled) { at::autocast::set_autocast_cache_enabled(enabled); }
int increment_nesting() { return at::autocast::increment_nesting(); }
int decrement_nesting() { return at::autocast::decrement_nesting(); }
void clear_torch_cache() { at::autocast::clear_cache(); }

HandRegion::HandRegion(c10::DeviceType device, c10::ScalarType dtype, bool enabled)
    : device_(device),
      dtype_(at::autocast::get_autocast_dtype(device)),
      enabled_(at::autocast::is_autocast_enabled(device)) {
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

HandRegion::~HandRegion() {
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(device_, enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_);
}

LeavesNoTrace::LeavesNoTrace() : found_(public_state()) {
  register_kernels();
  REQUIRE(policies_are_default());
  REQUIRE(found_.depth == 0);
}

LeavesNoTrace::~LeavesNoTrace() {
  CHECK(public_state() == found_);
  CHECK(kernels_registered());
  CHECK(policies_are_default());
}

TorchKernels::TorchKernels() { unregister_kernels(); }
TorchKernels::~TorchKernels() { register_kernels(); }

bool bit_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return false;
  }
  // On the host, which cannot read the memory of devices.
  const auto left = a.detach().cpu().contiguous();
  const auto right = b.detach().cpu().contiguous();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

}  // namespace fastamp::test
