// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/redirect/views.h"

#include "simulated_cuda/redirect/operators.h"
#include "simulated_cuda/simulated_cuda.h"

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstring>

namespace simulated_cuda {
namespace {

/// Of tensors that kernels of the CPU make larger: the memory is the device's.
class OutputAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const held = new c10::DataPtr(c10::cuda::CUDACachingAllocator::get()->allocate(bytes));
    return {host_view(held->get()), held, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static void release(void* held) { delete static_cast<c10::DataPtr*>(held); }
};

OutputAllocator& output_allocator() {
  static auto* const instance = new OutputAllocator();
  return *instance;
}

/// The device's memory behind a view that output_allocator() made larger; else null.
c10::DataPtr* new_memory(const c10::StorageImpl& view) {
  const c10::DataPtr& data = view.data_ptr();
  return data.get_deleter() == &OutputAllocator::release
             ? static_cast<c10::DataPtr*>(data.get_context())
             : nullptr;
}

void copy_shape(c10::TensorImpl& to, const at::Tensor& from) {
  to.set_storage_offset(from.storage_offset());
  to.set_sizes_and_strides(from.sizes(), from.strides());
}

void copy_marks(const at::Tensor& to, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_shape(*made.unsafeGetTensorImpl(), like);
  return made;
}

}  // namespace

std::size_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                                tensor.dtype().itemsize());
}

at::Tensor Views::to_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  for (const auto& [original, view] : tensors_) {
    if (original.is_same(tensor)) return view;
  }
  if (tensor.layout() == at::kSparse) {
    return sparse_to_host(tensor);
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, "simulated CUDA: no tensors of the layout ",
              tensor.layout());
  const at::Tensor view =
      make_tensor(c10::Storage(storage_to_host(tensor)), c10::DispatchKey::CPU, tensor);
  copy_marks(view, tensor);
  tensors_.emplace_back(tensor, view);
  return view;
}

at::Tensor Views::sparse_to_host(const at::Tensor& tensor) {
  has_sparse_ = true;
  const auto* const impl = at::sparse::get_sparse_impl(tensor);
  const BelowAutograd below;
  at::Tensor made = at::_sparse_coo_tensor_unsafe(to_host(impl->indices()), to_host(impl->values()),
                                                  tensor.sizes());
  made._coalesced_(impl->coalesced());
  tensors_.emplace_back(tensor, made);
  return made;
}

Views::StorageRef Views::storage_to_host(const at::Tensor& tensor) {
  const auto original = StorageRef::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
  for (const auto& [other, view] : storages_) {
    if (other == original) return view;
  }
  auto made = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), original->nbytes(),
      c10::DataPtr(host_view(original->data_ptr().get()), c10::Device(c10::kCPU)),
      &output_allocator(), /*resizable=*/true);
  storages_.emplace_back(original, made);
  return made;
}

at::Tensor Views::to_device(const at::Tensor& result, c10::Device device) {
  if (!result.defined()) {
    return result;
  }
  for (const auto& [original, view] : tensors_) {
    if (view.is_same(result)) return original;
  }
  if (result.layout() == at::kSparse) {
    return sparse_to_device(result, device);
  }
  TORCH_CHECK(result.layout() == at::kStrided, "simulated CUDA: no results of the layout ",
              result.layout());
  for (const auto& [original, view] : storages_) {
    if (view.get() == result.storage().unsafeGetStorageImpl()) {
      return make_tensor(c10::Storage(original), c10::DispatchKey::CUDA, result);
    }
  }
  return copy_to_device(result, device);
}

at::Tensor Views::sparse_to_device(const at::Tensor& result, c10::Device device) {
  const auto* const impl = at::sparse::get_sparse_impl(result);
  return at::_sparse_coo_tensor_unsafe(to_device(impl->indices(), device),
                                       to_device(impl->values(), device), result.sizes())
      ._coalesced_(result.is_coalesced());
}

at::Tensor Views::copy_to_device(const at::Tensor& result, c10::Device device) {
  at::Tensor made = at::empty_strided(result.sizes(), result.strides(),
                                      at::TensorOptions(result.dtype()).device(device));
  if (const auto bytes = bytes_of(result); bytes != 0) {
    std::memcpy(host_view(made.data_ptr()), result.data_ptr(), bytes);
  }
  copy_marks(made, result);
  return made;
}

void Views::hand_back() {
  for (const auto& [original, view] : storages_) {
    if (c10::DataPtr* const memory = new_memory(*view); memory != nullptr && memory->get()) {
      original->set_data_ptr_noswap(std::move(*memory));
    }
    if (original->nbytes() != view->nbytes()) {
      original->set_nbytes(view->nbytes());
    }
  }
  const BelowAutograd below;
  const auto all = tensors_;  // sparse tensors add to them
  for (const auto& [original, view] : all) {
    auto& impl = *original.unsafeGetTensorImpl();
    if (original.layout() == at::kSparse) {
      hand_back_sparse(original, view);
    } else if (impl.sizes() != view.sizes() || impl.strides() != view.strides() ||
               impl.storage_offset() != view.storage_offset()) {
      copy_shape(impl, view);
    }
  }
}

void Views::hand_back_sparse(const at::Tensor& original, const at::Tensor& view) {
  auto* const to = at::sparse::get_sparse_impl(original);
  const auto* const from = at::sparse::get_sparse_impl(view);
  const auto indices = to_device(from->indices(), original.device());
  const auto values = to_device(from->values(), original.device());
  if (!indices.is_same(to->indices()) || !values.is_same(to->values())) {
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), from->sizes());
    at::sparse::alias_into_sparse(original, indices, values);
  }
  to->set_coalesced(from->coalesced());
}

void Views::release() {
  tensors_.clear();
  storages_.clear();
}

}  // namespace simulated_cuda
