# SPDX-License-Identifier: Apache-2.0
"""Keeps faults of a tool out of the program that it looks at."""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ToolGuard", "warn_of_fault"]


def warn_of_fault(tool: str, error: BaseException, what: str) -> None:
    """Warns that a tool has failed, and what to send. Never raises, whatever the warning filters.

    Args:
        tool: Its name.
        error: What it raised.
        what: What that means for the tool.
    """
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"{tool} failed and {what}; the program goes on without it. "
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        text += f"It needs more memory than there is: {error}"
    else:
        text += (
            "This is a fault of fastamp: please report it with the output of `python -m fastamp "
            f"info` and these lines:\n{trace}"
        )
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Warning:  # Filters may make errors of warnings: that of the user's own code.
        print(text, file=sys.stderr)


class ToolGuard:
    """Runs a tool's own code within a program: all that hooks, patches, modes and exits call.

    What that code raises ends in one warning, and the tool is off from then on. What the program
    raises, interrupts and SystemExit pass: the program's own code must not be run by this.

    Args:
        tool: Its name, for the warning.
        what: What a failure means for it.

    Attributes:
        is_off: Whether the tool has failed.
    """

    def __init__(self, tool: str, what: str = "is off from here on") -> None:
        """Guards; nothing has failed yet."""
        self._tool, self._what = tool, what
        self.is_off = False

    def run(self, function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """Calls a function; the default if it raises, or the tool is off."""
        return default if self.is_off else self.run_always(function, *args, default=default)

    def run_always(self, function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """Does the same also if the tool is off: for what puts things back."""
        try:
            return function(*args)
        except Exception as error:
            self.fail(error)
            return default

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run by :meth:`run`."""

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            return self.run(function, *args)

        return guarded

    def fail(self, error: Exception) -> None:
        """Switches the tool off for an error, and says so the first time."""
        if not self.is_off:
            self.is_off = True
            warn_of_fault(self._tool, error, self._what)
