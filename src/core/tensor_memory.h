// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COWDeleter.h>

#include <cstddef>

// Where a tensor's numbers lie, for walks over thousands of tensors: each is three to four cache
// lines in memory, and waiting for them is most of what such a walk costs.
namespace fastamp {

namespace detail {

/// Whether a storage makes its memory, or a copy of it, when it is first written.
template <typename Storage>
bool materialises(const Storage& storage, const at::DataPtr& data) {
  if constexpr (requires { storage.has_materializer(); }) {  // LibTorch 2.15.
    if (storage.has_materializer()) {
      return true;
    }
  }
  return data.get_deleter() == &c10::impl::cow::cow_deleter;
}

}  // namespace detail

/// The address of a tensor's first element, if it can be had without a check and without side
/// effects; else null: there is no memory (yet), or it has to be copied before it is written. Then
/// the tensor's own accessors return, or do, what is needed.
inline void* address_of(const c10::TensorImpl& tensor) {
  auto* const storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) [[unlikely]] {
    return nullptr;
  }
  // The checks ask for copy-on-write, which is asked here, and for what makes access to fake and
  // functional tensors throw. They are in another cache line.
  const auto& data = storage->_mutable_data_ptr_no_checks();
  if (data.get() == nullptr || detail::materialises(*storage, data)) [[unlikely]] {
    return nullptr;
  }
  const auto offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
  return static_cast<char*>(data.get()) + offset;
}

/// Asks for a tensor's cache lines; its storage is another one.
inline void prefetch_tensor(const c10::TensorImpl* tensor) {
  __builtin_prefetch(tensor, /*rw=*/1);  // Its count of references and storage,
  const auto* const bytes = reinterpret_cast<const char*>(tensor);
  __builtin_prefetch(bytes + 64);                           // its offset and size,
  __builtin_prefetch(bytes + sizeof(c10::TensorImpl) - 1);  // its dtype, device and keys.
}

/// Asks for a storage's cache line. The tensor's own have to be there.
inline void prefetch_storage(const c10::TensorImpl* tensor) {
  __builtin_prefetch(tensor->unsafe_storage().unsafeGetStorageImpl());
}

}  // namespace fastamp
