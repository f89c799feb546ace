#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>

#include <typeinfo>

namespace fastamp::autocast {

/// Records in autograd that `out`, which has no history yet, is the cast of `source`.
void record_cast(const at::Tensor& source, const at::Tensor& out);

/// Type of the nodes that record_cast makes, for the Python module to name them.
FASTAMP_API const std::type_info& cast_node_type();

}  // namespace fastamp::autocast
