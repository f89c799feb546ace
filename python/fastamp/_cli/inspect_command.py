# SPDX-License-Identifier: Apache-2.0
"""One step of a whole program: ``--inspect FILE`` or ``--record FILE``, with ``--at-step N``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastamp._cli.output_file import OutputFile, rank_of_process
from fastamp._cli.watched_program import WatchedProgram
from fastamp._debug.check.rules import Cause, Findings
from fastamp._debug.compare.record import Record
from fastamp._debug.compare.recorded_step import RecordedStep
from fastamp._debug.inspect.inspected_step import InspectedStep
from fastamp._debug.watch.calls import CallListener, listening
from fastamp._debug.watch.modules import ModulePath
from fastamp._dynamo import carried_state
from fastamp._util.tool_guard import ToolGuard

__all__ = ["FIRST", "start", "start_record"]


#: What a step may be found by, beside its number, and what is said where none is found.
FIRST = {"skip": "no step was skipped", "nonfinite": "no step had inf or NaN in its gradients"}


def start(
    path: str | os.PathLike[str], at_step: int, first: str | None = None, program: str = ""
) -> None:
    """Inspects a step of this process and writes what was seen when the step has ended.

    Args:
        path: As for ``InspectReport.write``; ``-`` prints it.
        at_step: Number of the step, from 0, of the thread that comes to it first. A step ends with
            an optimizer's ``step()``, or with ``update()`` where there is an enabled gradient
            scaler; with the former also there, if it steps gradients that carry the scale.
        first: A name in :data:`FIRST`: every step from ``at_step`` on is inspected, and the first
            one that is like this is written.
        program: What is run, for the report's title.

    Raises:
        OSError: The file cannot be written; found out now, not when the step has run.
    """

    def make(watched: WatchedProgram, guard: ToolGuard, number: int) -> InspectedStep:
        return InspectedStep(
            watched.of_this_thread(watched.models),
            watched.optimizers,
            watched.of_this_thread(watched.scalers),
            Findings(),
            watched.names,
            guard,
            number=number,
            program=program,
        )

    file = OutputFile(path)
    _StepOfProgram("--inspect", make, lambda report: file.put(report), at_step, first).follow()


def start_record(path: str | os.PathLike[str], at_step: int) -> None:
    """Records a step of this process, for ``compare``; as :func:`start`."""

    def make(watched: WatchedProgram, guard: ToolGuard, number: int) -> RecordedStep:
        models = watched.of_this_thread(watched.models)
        scalers = watched.of_this_thread(watched.scalers)
        return RecordedStep(models, scalers, watched.names, guard, _rank_among(), number)

    file = OutputFile(path)

    def put(record: Record) -> Path | None:
        file.put_text(record.as_json())
        return file.path

    _StepOfProgram("--record", make, put, at_step).follow()


def _rank_among() -> tuple[int, int]:
    rank = rank_of_process()
    if rank is None:
        return 0, 1
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return rank, distributed.get_world_size()
    return rank, int(os.environ["WORLD_SIZE"])


class _InThread(threading.local):
    """Actions of a thread.

    Attributes:
        ended_steps: How many steps it has ended.
        has_scaler: Whether it scales losses.
        is_past_scaler: Whether its optimizer has just stepped past the scaler.
    """

    ended_steps = 0
    has_scaler = False
    is_past_scaler = False


class _StepOfProgram(CallListener):
    """Waits for a step, has it watched, writes the report.

    Args:
        option: That has asked for it.
        make: Makes what watches the step.
        put: Writes its report, and returns where.
        at_step: Number of the step, or of the first one that may be it.
        first: What the step is found by, of :data:`FIRST`; ``None``: by its number.
    """

    def __init__(
        self,
        option: str,
        make: Callable[[WatchedProgram, ToolGuard, int], InspectedStep | RecordedStep],
        put: Callable[[Any], Path | None],
        at_step: int,
        first: str | None = None,
    ) -> None:
        self.guard = ToolGuard(f"fastamp {option}")
        self._make, self._put, self._at_step, self._first = make, put, at_step, first
        self._past = {"--inspect": "inspected", "--record": "recorded"}[option]
        self._most_steps = 0  # that any thread has ended
        self._thread: int | None = None
        self._in_thread = _InThread()
        self._following = contextlib.ExitStack()
        self._program = WatchedProgram(self._see_forward, self.guard, self._close)
        self._step: InspectedStep | RecordedStep | None = None
        self._open = contextlib.ExitStack()
        self._path: ModulePath | None = None
        self._is_done = False
        self._process = os.getpid()

    def follow(self) -> None:
        """Looks on from now on."""
        self._following.enter_context(self._program.followed())
        self._following.enter_context(listening(self))
        self._run_eagerly()
        atexit.register(self.guard.run_always, self._finish)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this thread is another one than that of the step."""
        return self._thread not in (None, threading.get_ident())

    def _run_eagerly(self) -> None:
        """Before the step begins: no one sees the forward pass of a model that is compiled."""
        if self._in_thread.ended_steps == self._at_step:
            carried_state.hold()
            self._open.callback(carried_state.let_go)

    def _see_forward(self, model: torch.nn.Module) -> None:
        if self._is_done:
            self._following.close()
        elif self._is_elsewhere:
            self._program.names.add(model)  # Whose parameters are not of the step.
        elif not torch.is_grad_enabled():
            return
        elif self._step is None and self._in_thread.ended_steps == self._at_step:
            program = self._program
            self._thread = threading.get_ident()
            self._step = self._make(program, self.guard, self._at_step)
            for each in program.models:
                program.names.add(each)
            self._path = self._open.enter_context(self._step.watched())
            self._path.add(model, running=True)
        elif self._path is not None and not self._path.knows(model):
            self._path.add(model, running=True)

    def before_scale(self, scaler: Any, outputs: Any) -> None:  # noqa: ARG002
        """Notes that steps of this thread end with an update."""
        self._in_thread.has_scaler |= scaler.is_enabled()

    def after_update(self, scaler: Any) -> None:
        """The end of a step, unless that was its optimizer's."""
        if scaler.is_enabled() and not self._in_thread.is_past_scaler:
            self._end_step()
        self._in_thread.is_past_scaler = False

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """The end of a step, if no scaler's update follows that counts."""
        self._in_thread.is_past_scaler = self._program.scaled.stepped is optimizer
        if self._in_thread.is_past_scaler or not self._in_thread.has_scaler:
            self._end_step()

    def _end_step(self) -> None:
        if self._is_elsewhere:
            return
        self._in_thread.ended_steps += 1
        self._most_steps = max(self._most_steps, self._in_thread.ended_steps)
        if self._step is not None and not self._is_done:
            self._write()
        elif not self._is_done:
            self._run_eagerly()

    def _write(self) -> None:
        """Writes what was seen, or waits for the next step if the one wanted is another."""
        assert self._step is not None
        step, self._step, self._path = self._step, None, None
        self._open.close()
        report = self.guard.run(step.report)
        if report is not None and self._first is not None and not self._is_like(report.check.cause):
            self._at_step += 1
            self._run_eagerly()
            return
        self._is_done = True
        if report is None:
            return
        try:
            path = self._put(report)
            if path is not None:
                print(f"fastamp: step {self._at_step} is in {path}", file=sys.stderr)
        except OSError as error:
            print(f"fastamp: the step was not written: {error}", file=sys.stderr)

    def _is_like(self, cause: Cause | None) -> bool:
        return cause is not None and (self._first == "nonfinite" or cause.outcome == "was skipped")

    def _finish(self) -> None:
        """Ends with the process: a step without an end is reported as far as it went."""
        if self._step is not None and os.getpid() == self._process:
            self._write()
        if not self._is_done and not self.guard.is_off and os.getpid() == self._process:
            which = f"step {self._at_step} was not {self._past}"
            which = f"nothing was written: {FIRST[self._first]}" if self._first else which
            print(
                f"fastamp: {which}: the program ended after {self._most_steps} steps",
                file=sys.stderr,
            )
        self._close()

    def _close(self) -> None:
        self._is_done = True
        self._open.close()
        self._following.close()
