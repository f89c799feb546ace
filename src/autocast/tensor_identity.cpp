// SPDX-License-Identifier: Apache-2.0
#include "autocast/tensor_identity.h"

#include "core/cuda_part.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace fastamp::autocast {
namespace {

/// Null for tensors without one: sparse, mkldnn.
c10::StorageImpl* storage_impl_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// First byte of the tensor; of its storage where only user code knows the offset.
const void* data_of(const at::Tensor& tensor, c10::StorageImpl* storage) {
  if (storage == nullptr) {
    return nullptr;
  }
  const auto* begin = static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get());
  return has_geometry(tensor)
             ? begin + tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size())
             : begin;
}

}  // namespace

ExecutionContext execution_context(c10::Device device) {
  if (device.type() != c10::DeviceType::CUDA) {
    return {};
  }
  const auto* const part = cuda_part();
  if (part == nullptr) {
    return {};
  }
  // Not what the device guard says: that of fake tensors counts devices that there are not.
  static const bool has_device = at::detail::getCUDAHooks().hasCUDA();
  if (!has_device) {
    return {};  // A fake tensor.
  }
  const auto stream = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getStream(device);
  return {stream.id(), part->devices.graph_capture_id(stream)};
}

bool is_captured(const at::Tensor& tensor) {
  return !tensor.is_cpu() && execution_context(tensor.device()).graph_capture != 0;
}

bool knows_execution_context(c10::DeviceType device) { return has_kernels(device); }

bool TensorIdentity::exists_for(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->version_counter().enabled() && !impl->has_symbolic_sizes_strides() &&
         knows_execution_context(tensor.device().type());
}

TensorIdentity::TensorIdentity(const at::Tensor& tensor)
    : key_(tensor.unsafeGetTensorImpl()),
      tensor_(tensor.getIntrusivePtr()),
      storage_(tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
      data_(data_of(tensor, storage_impl_of(tensor))),
      context_(execution_context(tensor.device())),
      version_(version_of(tensor)) {}

bool TensorIdentity::is_current(const at::Tensor& tensor) const {
  return version_ == version_of(tensor) && is_in_same_place(tensor);
}

bool TensorIdentity::is_in_same_place(const at::Tensor& tensor) const {
  auto* storage = storage_impl_of(tensor);
  return key_ == tensor.unsafeGetTensorImpl() && storage_._unsafe_get_target() == storage &&
         data_ == data_of(tensor, storage);
}

at::Tensor TensorIdentity::lock() const {
  auto tensor = tensor_.lock();
  return tensor ? at::Tensor(std::move(tensor)) : at::Tensor();
}

}  // namespace fastamp::autocast
