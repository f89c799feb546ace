#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds after_optimizer_step(optimizer, args, kwargs) to the module: a hook that torch calls after
/// each step of a torch.optim.Optimizer. It ends the casts of the optimizer's weights, those of the
/// open regions of this thread and those that are kept, since a step may have written the weights
/// without moving their version counters. Where there are none, it costs the call.
bool add_optimizer_hook(PyObject* module);

}  // namespace fastamp::python
