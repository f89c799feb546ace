#include "autocast/tensor_identity.h"

#include <utility>

namespace fastamp::autocast {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// First byte of the tensor.
const void* data_of(const at::Tensor& tensor) {
  return static_cast<const char*>(storage_of(tensor)->_mutable_data_ptr_no_checks().get()) +
         tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
}

}  // namespace

bool TensorIdentity::exists_for(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() && impl->version_counter().enabled() &&
         !impl->has_symbolic_sizes_strides() && knows_execution_context(tensor.device().type());
}

TensorIdentity::TensorIdentity(const at::Tensor& tensor)
    : key_(tensor.unsafeGetTensorImpl()),
      tensor_(tensor.getIntrusivePtr()),
      storage_(tensor.storage().getWeakStorageImpl()),
      data_(data_of(tensor)),
      context_(execution_context(tensor.device())),
      version_(version_of(tensor)) {}

bool TensorIdentity::is_current(const at::Tensor& tensor) const {
  return version_ == version_of(tensor) && is_in_same_place(tensor);
}

bool TensorIdentity::is_in_same_place(const at::Tensor& tensor) const {
  return key_ == tensor.unsafeGetTensorImpl() &&
         storage_._unsafe_get_target() == storage_of(tensor) && data_ == data_of(tensor);
}

at::Tensor TensorIdentity::lock() const {
  auto tensor = tensor_.lock();
  return tensor ? at::Tensor(std::move(tensor)) : at::Tensor();
}

}  // namespace fastamp::autocast
