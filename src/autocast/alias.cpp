#include "autocast/alias.h"

#include <utility>

namespace fastamp::autocast {

at::Tensor make_alias(c10::Storage memory, const at::Tensor& shape, c10::ScalarType dtype,
                      const c10::VariableVersion& version) {
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(memory),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, shape.device())),
      c10::scalarTypeToTypeMeta(dtype));
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(shape.sizes(), shape.strides());
  impl->set_version_counter(version);
  return alias;
}

at::Tensor make_alias(const at::Tensor& tensor) {
  return make_alias(tensor.storage(), tensor, tensor.scalar_type(),
                    tensor.unsafeGetTensorImpl()->version_counter());
}

}  // namespace fastamp::autocast
