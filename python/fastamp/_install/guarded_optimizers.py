# SPDX-License-Identifier: Apache-2.0
"""A guard for each optimizer of a program that is not changed."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from contextlib import ExitStack
from typing import Any

import torch

from fastamp._install.installation import in_spawned_processes
from fastamp._scaler.step_guard import StepGuard
from fastamp._util.at_exit import AtExit
from fastamp._util.patches import Patches
from fastamp._util.tool_guard import ToolGuard

__all__ = ["start"]


class _GuardedOptimizers:
    """Guards what is constructed, and reports at the end what was skipped."""

    def __init__(self) -> None:
        self._tool = ToolGuard("python -m fastamp --guard")
        self._skips: dict[str, int] = {}
        self._first: list[str] = []
        self._patches = Patches()
        original: Any = torch.optim.Optimizer.__init__
        guard = self._tool.hook(self._guard)

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            guard(optimizer)

        self._patches.replace(torch.optim.Optimizer, "__init__", init)
        self._at_exit = AtExit(self._report)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__qualname__
        try:
            guard = StepGuard(optimizer)
        except ValueError as error:
            warnings.warn(f"--guard: {kind} runs without a guard. {error}", stacklevel=4)
            return
        guard.is_automatic = True
        reference = weakref.ref(guard)

        def note(_: Any, __: float, record: Any) -> None:
            self._skips[kind] = self._skips.get(kind, 0) + 1
            alive = reference()
            if not self._first and alive is not None:
                self._first.append(f"{kind}: {alive.overflow_report()}")
                print(f"fastamp --guard: step {record.step} of {kind} is skipped.", file=sys.stderr)

        guard.register_on_skip(self._tool.hook(note))

    def _report(self) -> None:
        for kind, count in self._skips.items():
            print(f"fastamp --guard: {count} steps of {kind} were skipped.", file=sys.stderr)
        for text in self._first:
            print(f"fastamp --guard: the first of them, {text}", file=sys.stderr)

    def close(self) -> None:
        """Guards no more optimizers; those that are guarded stay so."""
        self._patches.undo()
        self._at_exit.cancel()


def start() -> ExitStack:
    """Guards every optimizer that is made from now on, in processes that it spawns too.

    Returns:
        Ends it when it is closed.

    Warns:
        UserWarning: For an optimizer that cannot be guarded.
    """
    running = ExitStack()
    running.callback(_GuardedOptimizers().close)
    running.enter_context(in_spawned_processes(start))
    return running
