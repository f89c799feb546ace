#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds two functions to the module. has_observers(): whether a profiler, or another user of torch's
/// record_function, is there on any thread or this one. after_optimizer_step(optimizer, args,
/// kwargs): a hook that torch calls after
/// each step of a torch.optim.Optimizer. It ends the casts of the optimizer's weights, those of the
/// open regions of this thread and those that are kept, since a step may have written the weights
/// without moving their version counters. Where there are none, it costs the call.
bool add_optimizer_hook(PyObject* module);

}  // namespace fastamp::python
