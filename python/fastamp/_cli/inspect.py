# SPDX-License-Identifier: Apache-2.0
"""One step of a whole program: ``python -m fastamp --inspect FILE [--at-step N] train.py``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastamp._check.rules import Findings
from fastamp._cli.output_file import output_file
from fastamp._cli.watched_program import WatchedProgram
from fastamp._inspect.step import InspectedStep
from fastamp._patches import Patches
from fastamp._watch.modules import ModulePath
from fastamp.grad_scaler import GradScaler

__all__ = ["start"]


def start(path: str | os.PathLike[str], at_step: int) -> None:
    """Inspects a step of this process and writes what was seen when the step has ended.

    Args:
        path: As for ``InspectReport.write``; ``-`` prints it.
        at_step: Number of the step, from 0. A step ends with an optimizer's ``step()``, or with
            ``update()`` where there is an enabled gradient scaler.

    Raises:
        OSError: The file cannot be written; found out now, not when the step has run.
    """
    file = None if str(path) == "-" else output_file(path)
    _StepOfProgram(file, at_step).follow()


class _StepOfProgram:
    """Waits for a step, has it watched, writes the report."""

    def __init__(self, file: Path | None, at_step: int) -> None:
        self._file, self._at_step = file, at_step
        self._ended_steps = 0
        self._following = contextlib.ExitStack()
        self._program = WatchedProgram(self._see_forward)
        self._step: InspectedStep | None = None
        self._open = contextlib.ExitStack()
        self._path: ModulePath | None = None
        self._is_done = False

    def follow(self) -> None:
        """Looks on from now on."""
        self._following.enter_context(self._program.followed())
        patches = Patches()
        self._following.callback(patches.undo)
        original = GradScaler.update

        @functools.wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self._end_step()
            return result

        patches.replace(GradScaler, "update", update)
        self._following.callback(register_optimizer_step_post_hook(self._see_step).remove)
        atexit.register(self._finish)

    def _see_forward(self, model: torch.nn.Module) -> None:
        if self._is_done or not torch.is_grad_enabled():
            return
        if self._step is None and self._ended_steps == self._at_step:
            program = self._program
            self._step = InspectedStep(
                program.models, program.optimizers, program.scalers, Findings()
            )
            self._path = self._open.enter_context(self._step.watched())
        elif self._path is not None and not self._path.knows(model):
            self._path.add(model)

    def _see_step(self, *_: Any) -> None:
        if not any(scaler.is_enabled() for scaler in self._program.scalers):
            self._end_step()

    def _end_step(self) -> None:
        self._ended_steps += 1
        if self._step is not None and not self._is_done:
            self._write()

    def _write(self) -> None:
        assert self._step is not None
        self._is_done = True
        self._open.close()
        self._following.close()
        report = self._step.report()
        self._step = None
        if self._file is None:
            report.print()
            return
        try:
            report.write(self._file)
            print(f"fastamp: step {self._at_step} is in {self._file}", file=sys.stderr)
        except OSError as error:
            print(f"fastamp: the inspection was not written: {error}", file=sys.stderr)

    def _finish(self) -> None:
        """At the end of the process: a step without an end is told as far as it went."""
        if self._is_done:
            return
        if self._step is not None:
            self._write()
            return
        self._is_done = True
        self._following.close()
        print(
            f"fastamp: step {self._at_step} was not inspected: the program ended after "
            f"{self._ended_steps} steps",
            file=sys.stderr,
        )
