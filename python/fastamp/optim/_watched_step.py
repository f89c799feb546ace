# SPDX-License-Identifier: Apache-2.0
"""torch's wrapper of ``Optimizer.step``, called only while something observes the step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torchs

import fastamp._C as _C

if TYPE_CHECKING:
    from collections.abc import Callable


def has_hooks(optimizer: Any) -> bool:
    """Whether a hook of this optimizer or of all observes its step."""
    everybodys = torchs._global_optimizer_post_hooks
    # The hook that fastamp registers does nothing for our own optimizers.
    others = len(everybodys) > 1 or _C.after_optimizer_step not in everybodys.values()
    return bool(
        others
        or torchs._global_optimizer_pre_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    )


def is_watched(optimizer: Any) -> bool:
    """Whether a profiler or a hook observes its step."""
    return has_hooks(optimizer) or _C.has_observers()


def watched_if_asked_for(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``step`` as torch wraps the step of every optimizer, where that makes a difference.

    torch opens a profiler range and looks for hooks at each step: 20 us or more, a multiple of what
    a fused step of a small model takes. Without a profiler and without hooks that is left out.
    """
    watched: Any = torchs.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass's own step that calls this one is wrapped itself: hooks run once.
        outermost = type(self).step is wrapper
        if outermost and (torch.compiler.is_dynamo_compiling() or is_watched(self)):
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch wraps a step that is not.
    return wrapper
