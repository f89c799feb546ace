# SPDX-License-Identifier: Apache-2.0
"""Finds what a running program trains: its models, optimizers and gradient scalers."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import _has_any_global_hook, register_module_forward_pre_hook

from fastamp._debug.watch.calls import CallListener, listening
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.scaled_gradients import ScaledGradients
from fastamp._scaler.new_scalers import listen, stop_listening
from fastamp._util.tool_guard import ToolGuard

__all__ = ["EnoughSteps", "WatchedProgram", "enough_steps"]


_T = TypeVar("_T")


class EnoughSteps(SystemExit):
    """Ends a program of which enough was seen."""


def enough_steps() -> SystemExit:
    """Returns what ends the program, or a thread of it: ``threading`` prints all subclasses."""
    in_main = threading.current_thread() is threading.main_thread()
    return EnoughSteps(0) if in_main else SystemExit(0)


class WatchedProgram(CallListener):
    """Finds what a program trains and counts its steps.

    Attributes:
        models: Modules that were called outside of others, in that order.
        optimizers: All that were made.
        scalers: Gradient scalers that were made.
        names: Of the models' modules and parameters.
        scaled: Which gradients carry a loss scale.
        steps: Steps of optimizers, those that a scaler has skipped among them.
        skipped: Steps that a scaler has skipped on the host. A step that decides on the device
            whether it does anything is none.
    """

    def __init__(
        self,
        at_forward: Callable[[torch.nn.Module], None],
        guard: ToolGuard,
        when_off: Callable[[], None] = lambda: None,
    ) -> None:
        """Finds nothing yet.

        Args:
            at_forward: Called with a model before its forward pass; it may raise
                :func:`enough_steps`.
            guard: Of the tool.
            when_off: Called before forward passes when the tool has failed, to put things back.
        """
        self.guard = guard
        self._when_off = when_off
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[Any] = []
        self.names = ModelNames(self.optimizers)
        self.scaled = ScaledGradients(self.optimizers, guard)
        self.steps = self.skipped = 0
        self._in_thread = threading.local()
        self._users: dict[int, set[int]] = {}  # threads, by the identity of a model or scaler
        self._at_forward = at_forward
        self._known: set[torch.nn.Module] = set()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Looks on inside the block."""
        # The program's author has no hooks that fire once more for what torch.compile makes.
        about_hooks = "Using `torch.compile\\(module\\)` when there are global hooks"
        if not _has_any_global_hook():  # type: ignore[no-untyped-call]
            warnings.filterwarnings("ignore", about_hooks, UserWarning)
        listen(self.scalers)
        handle = register_module_forward_pre_hook(self._see_module)
        try:
            with listening(self), listening(self.scaled):
                yield
        finally:
            handle.remove()
            stop_listening(self.scalers)

    def _see_module(self, module: torch.nn.Module, args: Any) -> None:  # noqa: ARG002
        if torch.compiler.is_compiling():
            return
        if self.guard.is_off:
            self.guard.run_always(self._when_off)
        self.guard.run(self._see_forward, module)

    def _see_forward(self, module: torch.nn.Module) -> None:
        if module not in self._known:
            # A part that is called by itself before the whole is a model, too.
            self.models.append(module)
            self._known.update(module.modules())
        if any(module is model for model in self.models):
            self._is_used(module)
            self._at_forward(module)

    def of_this_thread(self, found: list[_T]) -> list[_T]:
        """Returns those of some models or scalers that no other thread alone has used."""
        here = threading.get_ident()
        return [each for each in found if here in self._users.get(id(each), {here})]

    def _is_used(self, what: object) -> None:
        self._users.setdefault(id(what), set()).add(threading.get_ident())

    def before_scale(self, scaler: Any, outputs: Any) -> None:  # noqa: ARG002
        """Notes whose it is."""
        self._is_used(scaler)

    def made_optimizer(self, optimizer: Any) -> None:
        """Notes it."""
        if all(each is not optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Counts."""
        self._in_thread.has_stepped = False

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Counts a step that was skipped."""
        if not self._in_thread.has_stepped:
            self.steps += 1
            self.skipped += 1

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Counts a step."""
        self.steps += 1
        self._in_thread.has_stepped = True
