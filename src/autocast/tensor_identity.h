#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// What tells that a tensor is still the one it was. Both need a tensor with a storage and a version
// counter.
namespace fastamp::autocast {

inline bool has_identity(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.unsafeGetTensorImpl()->version_counter().enabled();
}

inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// First byte of the tensor. `p.data = x` and resizing a storage bump no version but move the
/// memory.
inline const void* data_of(const at::Tensor& tensor) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get()) +
         tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
}

}  // namespace fastamp::autocast
