#pragma once

#include "kernels/amp_args.h"
#include "kernels/functors/norm.h"
#include "kernels/functors/scale_record.h"

#include <ATen/core/Tensor.h>

namespace fastamp::kernels {

/// Throws unless `t` is strided, has one element of `dtype` and is on `device`, that of
/// `device_of`.
void check_single(const char* fn, const char* name, const at::Tensor& t, at::ScalarType dtype,
                  c10::Device device, const char* device_of);

/// Throw what fastamp/ops/amp_ops.h promises; read no tensor data.
void check_unscale(const UnscaleArgs& args);
void check_norm(const NormArgs& args);
void check_update_scale(const UpdateScaleArgs& args);

/// Where a checked call wants the norm.
NormResults norm_results(const UnscaleArgs& args);
NormResults norm_results(const NormArgs& args);

/// A checked call with the addresses of its tensors.
ScaleUpdate scale_update(const UpdateScaleArgs& args);

}  // namespace fastamp::kernels
