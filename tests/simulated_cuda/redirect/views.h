// SPDX-License-Identifier: Apache-2.0
#pragma once

// CPU tensors over the memory of CUDA tensors.
//
// Stands for: dense tensors, sparse ones by coordinates, views, wrapped numbers, conjugates.
// Arguments that a kernel resizes get memory of torch's caching allocator. Does not stand for:
// other layouts, which are refused.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace simulated_cuda {

/// The views of the tensors of one call: aliases stay aliases.
class Views {
 public:
  /// What the CPU's kernel is given.
  at::Tensor to_host(const at::Tensor& tensor);
  /// What the CPU's kernel returned, for the device.
  at::Tensor to_device(const at::Tensor& result, c10::Device device);
  /// Gives arguments the shapes and the memory that their views have got.
  void hand_back();
  /// Keeps no tensor alive any more: a graph knows addresses alone.
  void release();

  bool has_sparse() const { return has_sparse_; }

 private:
  using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;

  at::Tensor sparse_to_host(const at::Tensor& tensor);
  at::Tensor sparse_to_device(const at::Tensor& result, c10::Device device);
  at::Tensor copy_to_device(const at::Tensor& result, c10::Device device);
  void hand_back_sparse(const at::Tensor& original, const at::Tensor& view);
  StorageRef storage_to_host(const at::Tensor& tensor);

  bool has_sparse_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<StorageRef, StorageRef>> storages_;
};

/// The bytes from a tensor's first element to its last.
std::size_t bytes_of(const at::Tensor& tensor);

}  // namespace simulated_cuda
