# SPDX-License-Identifier: Apache-2.0
"""Steps of torch's optimizers end the casts of the weights that they have written.

torch's fused steps, and other libraries' optimizers that write through ``.data``, move no version
counter: a cast made before the step would be used after it. Outside regions the hook costs one C
call.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import fastamp._C as _C
from fastamp._dynamo import compiler

register_optimizer_step_post_hook(_C.after_optimizer_step)


# Casts that a compiled function makes do not outlive it.
def _in_a_graph(optimizer: Any, args: Any, kwargs: Any) -> None:
    pass


compiler.when_dynamo_loads(lambda: compiler.trace_as(_C.after_optimizer_step, _in_a_graph))
