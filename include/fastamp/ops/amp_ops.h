// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tensor functions behind the gradient scaler. They are dispatcher ops of the same names
/// (torch.ops.fastamp.*), so they work under fake tensors, torch.compile and CUDA graph capture.

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fastamp::ops {

/// Multiplies gradients by the inverse loss scale in place and records whether any is non-finite.
///
/// Arithmetic is that of at::_amp_foreach_non_finite_check_and_unscale_, bit for bit (payloads of
/// NaN excepted): fp32 per element (fp64 for fp64 gradients), rounded to nearest even to the
/// gradient's dtype. When inv_scale is 1 the gradients are only read. Beyond torch: the check is of
/// what is written, so a finite gradient with a product that overflows, in fp16 for instance, is
/// reported too; one call takes mixed dtypes, and bfloat16 on CUDA. Bumps the version counter of
/// every gradient and of found_inf, as torch's in-place ops do; never records an autograd node.
///
/// @param grads      Strided tensors of any shape and strides on one device, float16, bfloat16,
///                   float32 or float64, mixed as they come; the list and its tensors may be empty.
///                   No two may share memory. Modified in place.
/// @param inv_scale  float32 tensor of one element on that device: 1 / loss scale, dimensionless.
/// @param found_inf  float32 tensor of one element on that device: set to 1 if any element of any
///                   gradient is inf or NaN, before or after, else left as it is; see
///                   overwrite_found_inf.
/// @param sum_of_squares  None, or float64, one element: overwritten with the sum that
///                   norm_and_check_ would give before this call, taken in the same pass. Squares
///                   of float64 gradients are rounded, and overflow beyond 1e154.
/// @param non_finite_counts  None, or as in norm_and_check_.
/// @param overwrite_found_inf  As in norm_and_check_.
/// @throws c10::TypeError   a dtype is not among those above.
/// @throws c10::ValueError  a tensor is undefined, on another device, not strided, overlaps itself,
///                          or another argument is not of the shape above. Nothing was changed.
/// @throws c10::NotImplementedError  the tensors are on a device other than CPU and CUDA.
/// @note CUDA: asynchronous on the current stream of the gradients' device, no host sync, one
///       launch for all tensors and dtypes, sum and counts included; while a stream is captured,
///       more than 1160 tensors take another launch per 32 KiB of addresses (20 to 28 bytes
///       each). CPU: uses at::get_num_threads() threads. Thread-safe for disjoint tensors.
FASTAMP_API void unscale_and_check_(
    at::TensorList grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
    const std::optional<at::Tensor>& sum_of_squares = std::nullopt,
    const std::optional<at::Tensor>& non_finite_counts = std::nullopt,
    bool overwrite_found_inf = false);

/// Reads gradients once: yields their norm and whether any is non-finite; writes no gradient.
///
/// sum_of_squares becomes sum((grad * inv_scale)^2) over all elements of all gradients: squares and
/// sums are taken in fp64, where no finite gradient overflows or underflows, in an order that
/// depends only on the number of elements of each tensor. So the result is the same, bit for bit,
/// for any number of threads, any launch shape and any address; between CPU and CUDA its last bits
/// may differ. It is inf or NaN if a gradient is. Bumps the versions of what it writes; never
/// records an autograd node.
///
/// @param grads           Strided tensors of any shape and strides on one device, float16, bfloat16
///                        or float32, mixed as they come; the list and its tensors may be empty.
/// @param inv_scale       float32, one element on that device: 1 / loss scale, dimensionless.
/// @param found_inf       float32, one element: set to 1 if any element of any gradient, its fp32
///                        product with inv_scale, or clip_coef is inf or NaN, else left as it is;
///                        see overwrite_found_inf.
/// @param sum_of_squares  float64, one element: overwritten.
/// @param non_finite_counts  None, or int64, contiguous, of shape [number of gradients, 2]: how
///                        many elements of each gradient are inf, alone or multiplied by
///                        inv_scale, and how many NaN. Written as a whole, and only if this call
///                        raised found_inf: else it still describes the last overflow.
/// @param max_norm        None, or the bound of clip_coef; not checked, like torch's.
/// @param clip_coef       None, or float32, one element, with max_norm: overwritten with
///                        min(1, max_norm / (total_norm + 1e-6)), the factor that
///                        torch.nn.utils.clip_grad_norm_ would apply, in its fp32 arithmetic. It is
///                        0 or NaN after inf or NaN, as torch's.
/// @param total_norm      None, or float32, one element: overwritten with sqrt(sum_of_squares).
/// @param overwrite_found_inf  found_inf may be without a value: it becomes 0 if all elements are
///                          finite, by the same launch that does the rest.
/// @throws c10::TypeError   a dtype is not among those above.
/// @throws c10::ValueError  a tensor is undefined, on another device, not strided, or not of the
///                          shape above. Nothing was changed.
/// @throws c10::NotImplementedError  the tensors are on a device other than CPU and CUDA.
/// @note CUDA: asynchronous on the current stream, no host sync, one launch (while a stream is
///       captured more, as for unscale_and_check_). CPU: uses at::get_num_threads() threads.
///       Thread-safe where the written tensors are disjoint.
FASTAMP_API void norm_and_check_(at::TensorList grads, const at::Tensor& inv_scale,
                                 const at::Tensor& found_inf, const at::Tensor& sum_of_squares,
                                 const std::optional<at::Tensor>& non_finite_counts = std::nullopt,
                                 std::optional<double> max_norm = std::nullopt,
                                 const std::optional<at::Tensor>& clip_coef = std::nullopt,
                                 const std::optional<at::Tensor>& total_norm = std::nullopt,
                                 bool overwrite_found_inf = false);

/// Adjusts the loss scale after a step: backoff on overflow, growth after a run of clean steps.
///
/// With the default options this is at::_amp_update_scale_, bit for bit:
///  - overflow (found_inf is not 0; NaN counts): growth_tracker = 0 and
///    scale = fp32(scale * backoff_factor), the product taken in fp64;
///  - clean step: growth_tracker + 1; when that equals growth_interval the tracker returns to 0 and
///    scale = fp32(scale * growth_factor), unless that is not finite (then the scale stays).
///
/// Options, all evaluated on the device:
///  - hysteresis: of consecutive overflows the first `hysteresis - 1` leave the scale alone; the
///    next one and every one directly after it back off. An overflow lowers hysteresis_tracker by
///    one, not below 0, and backs off only if it is then 0; a clean step sets it to `hysteresis`.
///    Every overflow resets growth_tracker, backed off or not. Start the tracker at `hysteresis`.
///  - fast_growth_interval, fast_growth_limit: a clean step also grows the scale if it is the
///    fast_growth_interval-th since growth_tracker was 0, or a later one, and the grown scale is
///    not above the limit. The limit is infinite until the scale first falls. A fall sets it to the
///    scale that it leaves; falls that follow without a growth in between leave the limit alone.
///  - min_scale, max_scale: applied last, to the result of every call: the scale is never outside
///    [min_scale, max_scale] afterwards. A NaN scale stays NaN.
///
/// @param scale               float32, one element: the loss scale. Modified in place.
/// @param growth_tracker      int32, one element: clean steps since the last change. In place.
/// @param found_inf           float32, one element: non-zero if the step overflowed. Read only.
/// @param growth_factor       Dimensionless; not checked, like torch's.
/// @param backoff_factor      Dimensionless; not checked, like torch's.
/// @param growth_interval     Clean steps before growth; <= 0 never grows.
/// @param hysteresis_tracker  int32, one element; needed when hysteresis > 1. In place.
/// @param hysteresis          >= 1; 1 backs off at each overflow.
/// @param min_scale           Lower bound, or none. Rounded to fp32.
/// @param max_scale           Upper bound, or none. Rounded to fp32.
/// @param inv_scale           None, or float32, one element: overwritten with 1 / scale, the scale
///                            being the new one; divided in fp64 and rounded once.
/// @param norm                None, or float32 or float64, one element: the norm of the step's
///                            gradients, for the history.
/// @param history             None, or float32, contiguous, of shape [capacity >= 1, 4], with
///                            history_count. Row history_count % capacity becomes (scale before the
///                            call, 1 if the step overflowed else 0, norm or NaN, growth tracker
///                            after the call).
/// @param history_count       int64, one element: number of rows ever written. In place: + 1.
/// @param new_scale           None, or float32, one element: the scale is set to it, and none of
///                            the above is done; the trackers stay. inv_scale and history are
///                            written as usual.
/// @param fast_growth_limit   None, or float32, one element, with fast_growth_interval. In place.
///                            Start it at infinity. From a fall to the next growth it is negative,
///                            its magnitude being the limit.
/// @param fast_growth_interval  Clean steps before a growth up to the limit; 0: none is fast.
/// @throws c10::TypeError   a tensor has another dtype.
/// @throws c10::ValueError  a tensor is undefined, has not one element, is not strided or is on
///                          another device; fast_growth_interval is negative or comes without its
///                          limit, or the limit alone; hysteresis is not in [1, 2^31) or lacks its
///                          tracker; a bound is NaN or min_scale > max_scale; the history is of
///                          another shape or lacks its count. Nothing was changed.
/// @throws c10::NotImplementedError  the tensors are on a device other than CPU and CUDA.
/// @note Asynchronous on CUDA (current stream), no host sync, one launch; safe in graph capture.
FASTAMP_API void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                               const at::Tensor& found_inf, double growth_factor,
                               double backoff_factor, int64_t growth_interval,
                               const std::optional<at::Tensor>& hysteresis_tracker = std::nullopt,
                               int64_t hysteresis = 1,
                               std::optional<double> min_scale = std::nullopt,
                               std::optional<double> max_scale = std::nullopt,
                               const std::optional<at::Tensor>& inv_scale = std::nullopt,
                               const std::optional<at::Tensor>& norm = std::nullopt,
                               const std::optional<at::Tensor>& history = std::nullopt,
                               const std::optional<at::Tensor>& history_count = std::nullopt,
                               const std::optional<at::Tensor>& new_scale = std::nullopt,
                               const std::optional<at::Tensor>& fast_growth_limit = std::nullopt,
                               int64_t fast_growth_interval = 0);

}  // namespace fastamp::ops
