#include "autocast/make/weight_view.h"

#include "autocast/make/plain.h"

#include <torch/csrc/autograd/variable.h>

namespace fastamp::autocast {
namespace {

bool is_dense(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_non_overlapping_and_dense();
}

}  // namespace

const at::Tensor* base_of_whole_view(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (meta == nullptr || !meta->has_bw_view()) {
    return nullptr;
  }
  const at::Tensor& base = meta->get_backward_view().base_;
  const bool same_elements =
      base.scalar_type() == tensor.scalar_type() && is_dense(tensor) && is_dense(base) &&
      base.numel() == tensor.numel() && base.storage_offset() == tensor.storage_offset() &&
      base.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
  return same_elements ? &base : nullptr;
}

}  // namespace fastamp::autocast
