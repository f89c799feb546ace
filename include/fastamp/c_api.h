// SPDX-License-Identifier: Apache-2.0
#ifndef FASTAMP_C_API_H
#define FASTAMP_C_API_H

/// fastamp for C, and so for the bindings of other languages: regions, the gradient scaler, and the
/// fused steps of SGD and AdamW. C99; docs/c_api.md is its guide.
///
/// Tensors are torch's `AtenTensorHandle`: a pointer to an `at::Tensor`, as torch's own C functions
/// (`aoti_torch_*`) make and delete it. Kinds of devices and dtypes are torch's numbers, which
/// `aoti_torch_device_type_cpu()`, `aoti_torch_dtype_bfloat16()` and the like return.
///
/// Every function returns a FastampStatus, and fastamp_last_error() then has the text of a failure.
/// No exception leaves a function, and a refused call changes nothing. An object is used by one
/// thread at a time; a region belongs to the thread that began it.

// NOLINTBEGIN(modernize-*, performance-enum-size): C has no others

#include <fastamp/macros.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct AtenTensorOpaque;
typedef struct AtenTensorOpaque* AtenTensorHandle;

/// Outcome of a call. New codes may be added: all but FASTAMP_OK are failures.
typedef enum FastampStatus {  // NOLINT(cppcoreguidelines-use-enum-class): of C
  FASTAMP_OK = 0,
  FASTAMP_ERROR = 1,            ///< Anything not named below.
  FASTAMP_VALUE_ERROR = 2,      ///< An argument has a value that is refused.
  FASTAMP_TYPE_ERROR = 3,       ///< An argument is of a kind or dtype that is refused.
  FASTAMP_NOT_IMPLEMENTED = 4,  ///< Nothing computes this, such as for a device.
  FASTAMP_OUT_OF_MEMORY = 5     ///< Of the host or of a device.
} FastampStatus;

/// Stands for a dtype: the one that is set for the device.
#define FASTAMP_DEFAULT_DTYPE (-1)

typedef struct FastampRegion FastampRegion;
typedef struct FastampScaler FastampScaler;
typedef struct FastampOptimizer FastampOptimizer;

/// The text of the last failure on this thread; empty if there was none. Valid until the next
/// failure on this thread.
FASTAMP_API const char* fastamp_last_error(void);

/// Begins a mixed-precision region on this thread: fastamp::AutocastGuard.
///
/// @param device_type  Kind of device whose ops are autocast.
/// @param dtype  The lower precision, or FASTAMP_DEFAULT_DTYPE.
/// @param enabled  0 switches autocast off inside the region.
/// @param region  Gets the region, for fastamp_region_end().
FASTAMP_API FastampStatus fastamp_region_begin(int32_t device_type, int32_t dtype, int32_t enabled,
                                               FastampRegion** region);

/// Ends a region, in any order, on the thread that began it. On another thread it changes nothing
/// but warns, and the object is gone as well.
///
/// @param region  NULL: nothing happens.
FASTAMP_API FastampStatus fastamp_region_end(FastampRegion* region);

/// Options of a scaler; fastamp_scaler_options_init() fills in the defaults, which are torch's.
typedef struct FastampScalerOptions {
  size_t size;              ///< Of this struct, in bytes: how later versions add fields.
  int32_t device_type;      ///< Kind of device that holds the scale.
  int32_t enabled;          ///< 0: everything passes through unchanged.
  double init_scale;        ///< First scale.
  double growth_factor;     ///< Of the scale, after growth_interval good iterations.
  double backoff_factor;    ///< Of the scale, after an overflow.
  int64_t growth_interval;  ///< Iterations.
} FastampScalerOptions;

/// Fills in the defaults: for CPU, enabled.
FASTAMP_API FastampStatus fastamp_scaler_options_init(FastampScalerOptions* options);

/// Makes a scaler: fastamp::GradScaler.
///
/// @param options  NULL: the defaults.
/// @param scaler  Gets it, for fastamp_scaler_free().
FASTAMP_API FastampStatus fastamp_scaler_new(const FastampScalerOptions* options,
                                             FastampScaler** scaler);

/// Frees a scaler, or does nothing for NULL. Optimizers stay.
FASTAMP_API FastampStatus fastamp_scaler_free(FastampScaler* scaler);

/// Multiplies a loss by the scale.
///
/// @param scaler  The scaler.
/// @param outputs  Any shape and floating dtype; borrowed.
/// @param scaled  Gets a new tensor, for aoti_torch_delete_tensor_object().
FASTAMP_API FastampStatus fastamp_scaler_scale(FastampScaler* scaler, AtenTensorHandle outputs,
                                               AtenTensorHandle* scaled);

/// Divides an optimizer's gradients by the scale now, for code that looks at them before the step.
FASTAMP_API FastampStatus fastamp_scaler_unscale(FastampScaler* scaler,
                                                 FastampOptimizer* optimizer);

/// Clips gradients to a norm within the step that follows.
///
/// @param scaler  The scaler.
/// @param optimizer  Whose gradients.
/// @param max_norm  The greatest norm that stays.
/// @param norm_type  Order of the norm; 2 is Euclid's.
/// @param total_norm  Gets a new tensor with the norm before clipping, on the device; NULL: it is
///     not wanted.
FASTAMP_API FastampStatus fastamp_scaler_clip_grad_norm(FastampScaler* scaler,
                                                        FastampOptimizer* optimizer,
                                                        double max_norm, double norm_type,
                                                        AtenTensorHandle* total_norm);

/// Makes an optimizer's step, unscaled, or skips it where a gradient overflowed. Does not wait.
FASTAMP_API FastampStatus fastamp_scaler_step(FastampScaler* scaler, FastampOptimizer* optimizer);

/// Ends the iteration: moves the scale. Does not wait for the device.
FASTAMP_API FastampStatus fastamp_scaler_update(FastampScaler* scaler);

/// Waits for the device and reads the scale.
FASTAMP_API FastampStatus fastamp_scaler_get_scale(const FastampScaler* scaler, double* scale);

/// Returns, after fastamp_scaler_update(), whether the iteration skipped a step: 1, else 0. Waits
/// only if the device has not come that far.
FASTAMP_API FastampStatus fastamp_scaler_step_was_skipped(FastampScaler* scaler, int32_t* skipped);

/// Waits for the device and reads what a checkpoint needs: the scale, and the good iterations since
/// it changed. Refused for a disabled scaler.
FASTAMP_API FastampStatus fastamp_scaler_get_state(const FastampScaler* scaler, double* scale,
                                                   int64_t* growth_tracker);

/// Sets what fastamp_scaler_get_state() has read.
FASTAMP_API FastampStatus fastamp_scaler_set_state(FastampScaler* scaler, double scale,
                                                   int64_t growth_tracker);

/// Options of SGD; fastamp_sgd_options_init() fills in the defaults, which are torch's.
typedef struct FastampSgdOptions {
  size_t size;  ///< Of this struct, in bytes.
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  int32_t nesterov;
  int32_t maximize;
} FastampSgdOptions;

/// Fills in the defaults: a learning rate of 0.001, and 0 for all else.
FASTAMP_API FastampStatus fastamp_sgd_options_init(FastampSgdOptions* options);

/// Makes an optimizer with a fused step: fastamp::optim::SGD.
///
/// @param parameters  Leaves that require gradients. Borrowed; the optimizer keeps references.
/// @param count  How many.
/// @param options  NULL: the defaults.
/// @param optimizer  Gets it, for fastamp_optimizer_free().
FASTAMP_API FastampStatus fastamp_sgd_new(const AtenTensorHandle* parameters, size_t count,
                                          const FastampSgdOptions* options,
                                          FastampOptimizer** optimizer);

/// Options of AdamW; fastamp_adamw_options_init() fills in the defaults, which are torch's.
typedef struct FastampAdamWOptions {
  size_t size;  ///< Of this struct, in bytes.
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  int32_t amsgrad;
} FastampAdamWOptions;

/// Fills in the defaults: 0.001, 0.9, 0.999, 1e-8, 0.01, no amsgrad.
FASTAMP_API FastampStatus fastamp_adamw_options_init(FastampAdamWOptions* options);

/// Does what fastamp_sgd_new() does, for fastamp::optim::AdamW.
FASTAMP_API FastampStatus fastamp_adamw_new(const AtenTensorHandle* parameters, size_t count,
                                            const FastampAdamWOptions* options,
                                            FastampOptimizer** optimizer);

/// Frees an optimizer with its state, or does nothing for NULL. Not in the middle of an iteration
/// of a scaler that has seen it.
FASTAMP_API FastampStatus fastamp_optimizer_free(FastampOptimizer* optimizer);

/// Makes a step without a scaler.
FASTAMP_API FastampStatus fastamp_optimizer_step(FastampOptimizer* optimizer);

/// Drops the gradients of the optimizer's parameters.
FASTAMP_API FastampStatus fastamp_optimizer_zero_grad(FastampOptimizer* optimizer);

/// Sets the learning rate of the steps to come.
FASTAMP_API FastampStatus fastamp_optimizer_set_lr(FastampOptimizer* optimizer, double lr);

/// Makes a leaf a parameter, or, with 0, a constant; for programs that have nothing else for it.
FASTAMP_API FastampStatus fastamp_tensor_set_requires_grad(AtenTensorHandle tensor,
                                                           int32_t requires_grad);

/// Runs the backward pass of a tensor of one element; for programs that have nothing else for it.
FASTAMP_API FastampStatus fastamp_tensor_backward(AtenTensorHandle loss);

/// Gives a tensor's gradient.
///
/// @param tensor  The tensor; borrowed.
/// @param gradient  Gets a new handle, or NULL where there is no gradient.
FASTAMP_API FastampStatus fastamp_tensor_grad(AtenTensorHandle tensor, AtenTensorHandle* gradient);

#ifdef __cplusplus
}  // extern "C"
#endif

// NOLINTEND(modernize-*, performance-enum-size)

#endif  // FASTAMP_C_API_H
