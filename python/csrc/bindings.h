// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

// The parts that module.cpp makes fastamp._C of: each adds its types and functions to the module,
// and is defined in a source of its own.
namespace fastamp::python {

/// Gives the autograd nodes of our casts the Python type that torch's have, at once.
void bind_cast_node(pybind11::module_& module);

/// Lets torch.clear_autocast_cache() empty our cast cache too.
void bind_clear_cache(pybind11::module_& module);

/// Bindings: which ops read which weights.
void bind_convert(pybind11::module_& module);

/// Fp8 recipes: what is in force, and which weights are excluded.
void bind_float8(pybind11::module_& module);

/// Bindings: what a recipe does with the products of a model, before it runs.

/// Lists of gradients, for functions that know of no scaler.
void bind_gradients(pybind11::module_& module);

/// Binds what torch's names stand for while some thread has op policies of a block, or a recipe.
void bind_held_state(pybind11::module_& module);

/// Casts of weights that outlive regions.
void bind_kept_casts(pybind11::module_& module);

/// The steps of the optimizers.
void bind_optim(pybind11::module_& module);

/// Moments in 8 bits, for checkpoints and changes of layout.
void bind_moment_codes(pybind11::module_& module);

/// Op table, policies and registration.
void bind_policy(pybind11::module_& module);

/// Bindings: how large the elements of tensors are.
void bind_ranges(pybind11::module_& module);

/// The native half of the Python GradScaler.
void bind_scaler(pybind11::module_& module);

/// Bindings: what a scaler asks of an optimizer's step.
void bind_amp_step(pybind11::module_& module);

/// Traces, and where in the Python program an op was called.
void bind_trace(pybind11::module_& module);

// Made with Python's C API, whose calls cost less than pybind11's: false with a Python error set.

/// The type `Region`, the native base of fastamp.autocast, and the functions it is set up with.
bool add_region_type(PyObject* module);

/// Bindings: what fastamp.install() needs to run torch's own region class on our native regions.
bool add_torch_region_functions(PyObject* module);

/// The type `MirrorBase`: a module that looks up names that it lacks in another module.
bool add_mirror_type(PyObject* module);

/// Two functions. has_observers(): whether a profiler, or another user of torch's record_function,
/// is active. after_optimizer_step(optimizer, args, kwargs): a hook that torch calls after each
/// step of a torch.optim.Optimizer. It ends the casts of the optimizer's weights, those of the open
/// regions of this thread and those that are kept, since a step may have written the weights
/// without moving their version counters. Where there are none, it costs the call.
bool add_optimizer_hook(PyObject* module);

}  // namespace fastamp::python
