# SPDX-License-Identifier: Apache-2.0
"""Functions that a gradient scaler calls when a step was skipped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from fastamp._scaler.reports import StepRecord

SkipHook = Callable[[Any, float, "StepRecord"], object]


class SkipHooks:
    """The hooks of one scaler, in the order in which they were registered.

    They belong to the scaler and not to its core: most refer to the scaler, and Python's garbage
    collector could not see a cycle through the core.
    """

    def __init__(self) -> None:
        """Has no hooks yet."""
        self._hooks: OrderedDict[int, tuple[SkipHook, bool]] = OrderedDict()

    def add(self, function: str, argument: str, hook: Any, wait: Any) -> RemovableHandle:
        """Adds a hook; see :meth:`fastamp.GradScaler.register_on_skip`."""
        if not callable(hook):
            raise TypeError(
                f"{function}: expected {argument} to be callable, got {type(hook).__name__}"
            )
        if not isinstance(wait, bool):
            raise TypeError(f"{function}: expected wait to be a bool, got {type(wait).__name__}")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = (hook, wait)
        return handle

    def wait(self) -> bool:
        """Whether ``update`` has to wait for the device."""
        return any(wait for _, wait in self._hooks.values())

    def notify(self, optimizer: Any, record: StepRecord) -> None:
        """Calls all hooks."""
        for key, (hook, _) in tuple(self._hooks.items()):
            if key in self._hooks:  # Another hook may have removed it.
                hook(optimizer, record.scale, record)
