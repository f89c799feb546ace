# SPDX-License-Identifier: Apache-2.0
"""Numbers of each training step for a logger: TensorBoard, Weights & Biases, a function."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import fastamp._C as _C
from fastamp._scaler import logs
from fastamp._scaler.reports import caller_level
from fastamp._scaler.state import ScalerState, core_of, keeps_history
from fastamp._scaler.step_guard import StepGuard, core_of_guard
from fastamp._util.at_exit import AtExit
from fastamp._util.held import Held
from fastamp._util.tool_guard import ToolGuard

__all__ = ["StepLog", "log_to"]

_Send = Callable[[dict[str, float], int], object]


def _warn(text: str) -> None:
    """Warns of the line that called the scaler; filters may not make that the training's error."""
    try:
        warnings.warn(text, stacklevel=caller_level())
    except Warning:
        print(text, file=sys.stderr)


def _sender(writer: Any) -> _Send:
    if not isinstance(writer, (type, logging.Logger)):
        if callable(getattr(writer, "add_scalar", None)):

            def send(values: dict[str, float], step: int) -> None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

            return send
        if callable(getattr(writer, "log", None)):
            return lambda values, step: writer.log(values, step=step)
        if callable(writer):
            send_values: _Send = writer
            return send_values
    raise TypeError(
        "log_to: expected writer to have add_scalar, as TensorBoard's SummaryWriter, or log, as a "
        f"run of Weights & Biases, or to be a function of values and step, got {writer!r:.200}"
    )


class StepLog(Held):
    """Result of :func:`log_to`: passes rows on until it is released, also as a context manager.

    Keeps itself in force, and the writer alive, until then. It keeps nothing of a scaler alive.
    """

    def __init__(self, send: _Send, prefix: str, casts: bool) -> None:
        """Attaches to nothing yet."""
        self._send = send
        self._prefix = prefix
        self._casts = casts
        self._guard = ToolGuard("fastamp.debug.log_to")
        self._loggers: list[_C.StepLogger] = []
        self._released = False
        # Loggers end in handlers of atexit that were registered before us and so run after
        # fastamp's. Those do not run in a child of multiprocessing.
        self._process = os.getpid()
        atexit.register(self._finish)
        self._at_exit = AtExit(self._finish)

    def _listen(self, scaler: Any, core: _C.ScalerCore) -> None:
        """Attaches to a scaler that has come into use."""
        self._guard.run(self._attach, scaler, core)

    def _attach(self, scaler: Any, core: _C.ScalerCore) -> None:
        if not keeps_history(scaler):
            return
        has_scale = isinstance(scaler, ScalerState)
        number = len(self._loggers) + 1
        prefix = f"{self._prefix}{number if number > 1 else ''}/"

        def receive(step: int, *numbers: Any) -> None:
            row = self._guard.run(self._row, prefix, has_scale, *numbers)
            if row is None:
                self._drop()
                return
            try:
                self._send(row, step)
            except Exception as error:
                self._drop()
                _warn(
                    f"log_to: the writer raised {type(error).__name__} at step {step} ({error}). "
                    "Nothing more is logged."
                )

        self._loggers.append(core.log_to(receive, self._casts))

    def _row(
        self,
        prefix: str,
        has_scale: bool,
        scale: float,
        skipped: bool,
        norm: float,
        overflows: int,
        underflows: int | None,
        casts: int,
        cast_bytes: int,
    ) -> dict[str, float]:
        values: dict[str, float] = {"scale": scale} if has_scale else {}
        values["skipped"] = float(skipped)
        if math.isfinite(norm):
            values["norm"] = norm
        values["overflows"] = overflows
        if underflows is not None:
            values["underflows"] = underflows
        if self._casts:
            values |= {"casts": casts, "cast_bytes": cast_bytes}
        return {prefix + name: value for name, value in values.items()}

    def flush(self) -> None:
        """Passes on the rows that have not arrived yet. Waits for the device."""
        for logger in tuple(self._loggers):
            logger.pass_on(True)

    def release(self) -> None:
        """Passes on what has not arrived yet, and ends the log. Safe to call again."""
        try:
            self.flush()
        finally:
            self._drop()

    def _drop(self) -> None:
        self._released = True
        logs.stop_listening(self._listen)
        atexit.unregister(self._finish)
        self._at_exit.cancel()
        for logger in self._loggers:
            logger.drop()
        self._loggers.clear()

    def _finish(self) -> None:
        if os.getpid() == self._process:
            self._guard.run_always(self.release)

    def __repr__(self) -> str:
        """Returns of how many scalers rows come."""
        state = "released" if self._released else f"of {len(self._loggers)} scalers"
        return f"<log_to, {state}>"


def log_to(
    writer: Any,
    scaler: Any = None,
    *,
    prefix: str = "amp",
    casts: bool = True,
) -> StepLog:
    """Gives a logger some numbers of each iteration of gradient scalers and guarded optimizers.

    ::

        writer = SummaryWriter()
        log = fastamp.debug.log_to(writer, scaler)

    Nothing waits for them: the device sends what it did to the host at the end of each iteration. A
    row is passed on by the first ``update()``, or question to the scaler, that finds it there; on
    the CPU that is the ``update()`` itself. A guarded optimizer's ``step`` does it, too. What is on
    its way when the log is released, or the process ends, is waited for. If the writer raises, a
    warning says so, the log is released, and training goes on.

    Under ``prefix/`` there are:

    - ``scale``: the loss scale that the iteration used (not of a ``StepGuard``), and ``skipped``: 1
      if it was skipped, since a gradient was inf or NaN, else 0.
    - ``norm``: of all unscaled gradients before clipping, where it was computed and is finite.
    - ``overflows``: how many gradient elements were inf or NaN.
    - ``underflows``: how many were 0, at the iterations at which that is counted; see
      :meth:`fastamp.GradScaler.underflow_report`.
    - ``casts`` and ``cast_bytes``: what autocast has cast since the iteration before, on all
      threads. What CUDA graphs replay and compiled code does is not seen.

    Args:
        writer: An object with ``add_scalar(name, value, step)``, such as TensorBoard's
            ``SummaryWriter``; or with ``log(values, step=step)``, such as a run of Weights & Biases
            (which refuses a step below one that it has seen: if you log to it too, do so with the
            same steps, or give a function); or a function of a dict of numbers and the iteration.
        scaler: A ``fastamp.GradScaler`` or ``fastamp.StepGuard``. ``None``: all that are used for
            the first time from now on; the second one's names begin with ``prefix2/``.
        prefix: Of the names.
        casts: Count casts, which costs up to a microsecond for each op in a region.

    Returns:
        Ends the log by ``release()``, or at the end of a ``with`` block. It need not be kept.

    Raises:
        TypeError: ``writer`` is no such object, ``scaler`` neither a scaler nor a guard of fastamp,
            ``prefix`` no string or ``casts`` no bool.
        ValueError: ``scaler`` was made with ``history_size=0``.

    Note:
        A disabled scaler has no iterations and so no rows; nor has one on a device without
        :meth:`fastamp.GradScaler.history`. Not thread-safe, as the scaler.
    """
    send = _sender(writer)
    if scaler is not None and not isinstance(scaler, (ScalerState, StepGuard)):
        raise TypeError(
            "log_to: expected scaler to be a fastamp.GradScaler or StepGuard, got "
            f"{type(scaler).__name__}"
        )
    if not isinstance(prefix, str):
        raise TypeError(f"log_to: expected prefix to be a str, got {type(prefix).__name__}")
    if not isinstance(casts, bool):
        raise TypeError(f"log_to: expected casts to be a bool, got {type(casts).__name__}")
    is_enabled = isinstance(scaler, StepGuard) or (scaler is not None and scaler.is_enabled())
    if is_enabled and not keeps_history(scaler):
        raise ValueError("log_to: expected scaler to keep a history, got one of history_size=0")
    log = StepLog(send, prefix, casts)
    if scaler is None:
        logs.listen(log._listen)
    elif is_enabled:
        core = core_of_guard(scaler) if isinstance(scaler, StepGuard) else core_of(scaler)
        log._attach(scaler, core)
    return log
