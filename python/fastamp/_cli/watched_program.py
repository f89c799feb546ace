# SPDX-License-Identifier: Apache-2.0
"""What a program trains: its models, optimizers and gradient scalers, found while it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastamp._patches import Patches
from fastamp._trace.scalers import listen, stop_listening
from fastamp.grad_scaler import GradScaler

__all__ = ["EnoughSteps", "WatchedProgram"]


class EnoughSteps(SystemExit):
    """Ends a program of which enough was seen."""


class WatchedProgram:
    """Finds what a program trains and counts its steps.

    Attributes:
        models: Modules that were called outside of others, in that order.
        optimizers: All that were made.
        scalers: Gradient scalers that were made.
        steps: Steps of optimizers, those that a scaler has skipped among them.
        skipped: Steps that a scaler has skipped on the host. A step that decides on the device
            whether it does anything is none.
    """

    def __init__(self, at_forward: Callable[[torch.nn.Module], None]) -> None:
        """Finds nothing yet.

        Args:
            at_forward: Called with a model before its forward pass; it may raise
                :class:`EnoughSteps`.
        """
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[Any] = []
        self.steps = self.skipped = 0
        self._at_forward = at_forward
        self._known: set[torch.nn.Module] = set()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Looks on inside the block."""
        patches = Patches()
        original = torch.optim.Optimizer.__init__
        made = self.optimizers

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if all(each is not optimizer for each in made):
                made.append(optimizer)

        scaler_step = GradScaler.step

        @functools.wraps(scaler_step)
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            taken = self.steps
            result = scaler_step(scaler, *args, **kwargs)
            if self.steps == taken:
                self.steps += 1
                self.skipped += 1
            return result

        patches.replace(torch.optim.Optimizer, "__init__", init)
        patches.replace(GradScaler, "step", step)
        listen(self.scalers)
        handles = [
            register_module_forward_pre_hook(self._see_module),
            register_optimizer_step_post_hook(self._see_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            stop_listening(self.scalers)
            patches.undo()

    def _see_module(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._known:
            # A part that is called by itself before the whole is a model, too.
            self.models.append(module)
            self._known.update(module.modules())
        if any(module is model for model in self.models):
            self._at_forward(module)

    def _see_step(self, *_: Any) -> None:
        self.steps += 1
