# SPDX-License-Identifier: Apache-2.0
"""Traces of what autocast does: ops, dtypes, casts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import fastamp._C as _C
from fastamp._debug.report import PageReport
from fastamp._debug.trace.trace_page import page_of
from fastamp._debug.trace.trace_plot import draw
from fastamp._debug.trace.trace_rows import COUNTS, TraceRow, sums_by_op
from fastamp._debug.watch.origins import short_path
from fastamp._scaler.new_scalers import as_lines, describe, listen, stop_listening
from fastamp._util.tool_guard import ToolGuard

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TraceRow", "trace"]

_PACKAGES = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[2])
_C.skip_source_folders([str(folder) + os.sep for folder in _PACKAGES])


class trace(PageReport):  # noqa: N801 (used like torch.no_grad)
    """Records every op call that fastamp's autocast kernels handle inside a ``with`` block.

    ::

        with fastamp.debug.trace() as t:
            train_step()
        print(t)

    Calls of all threads of the process are recorded, those of backward passes included. Blocks may
    nest and overlap; each records all calls. A block that is entered again adds to what it has.
    Code that was compiled or exported runs no autocast kernels and is not seen; the profiler of
    torch sees it. While no trace is open nothing is recorded and nothing is slower.

    Gradient scalers that are made inside a block are reported too, with their scale and skipped
    steps; the trace keeps them alive.

    Args:
        source: Distinguish calls by the module and the line of Python that made them. Costs some
            microseconds per op call while the trace is open.
        scaler: A gradient scaler, made before the block, that is to be reported too.

    Raises:
        TypeError: ``source`` is not a bool, or ``scaler`` no gradient scaler.
    """

    kind: ClassVar[str] = "trace"

    def __init__(
        self, *, source: bool = False, scaler: torch.amp.grad_scaler.GradScaler | None = None
    ) -> None:
        """Makes a trace that is not open yet."""
        if not isinstance(source, bool):
            raise TypeError(f"trace: expected source to be a bool, got {type(source).__name__}")
        if scaler is not None and not isinstance(scaler, torch.amp.grad_scaler.GradScaler):
            raise TypeError(
                f"trace: expected scaler to be a GradScaler or None, got {type(scaler).__name__}"
            )
        self._recorder = _C.Recorder(source)
        self._guard = ToolGuard("fastamp.debug.trace", "is incomplete")
        self._scalers: list[Any] = [] if scaler is None else [scaler]

    def __del__(self) -> None:
        """Ends recording when nothing refers to the trace any more."""
        if hasattr(self, "_scalers"):
            self._recorder.stop()
            stop_listening(self._scalers)

    def __enter__(self) -> trace:
        """Starts recording.

        Raises:
            RuntimeError: The trace is open already.
        """
        if not self._recorder.start():
            raise RuntimeError("trace: expected a trace that is not open, got one that is")
        self._guard.run(listen, self._scalers)
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends recording; what was recorded stays."""
        self._guard.run_always(self._recorder.stop)
        self._guard.run_always(stop_listening, self._scalers)

    @property
    def rows(self) -> list[TraceRow]:
        """Rows recorded so far, in no particular order. May be read while the trace is open."""
        return [TraceRow(**row) for row in self._recorder.rows()]

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all rows: ``calls`` and the counts of casts; and those of gradient casts.

        ``gradient_casts`` and ``gradient_cast_bytes`` are the casts of gradients back to the dtype
        of what was cast, made by backward passes.
        """
        rows = self.rows
        totals = {name: sum(getattr(row, name) for row in rows) for name in ("calls", *COUNTS)}
        totals["gradient_casts"], totals["gradient_cast_bytes"] = self._recorder.gradient_casts()
        return totals

    def table(self, sort_by: str = "cast_bytes", row_limit: int = 100) -> str:
        """The rows as text, as ``print(t)`` shows them.

        Args:
            sort_by: ``"cast_bytes"``, ``"casts"``, ``"calls"`` (largest first) or ``"name"``.
            row_limit: Rows shown at most; the totals are over all of them.

        Raises:
            ValueError: Unknown ``sort_by``.
        """
        return self._recorder.table(sort_by, row_limit, short_path) + self._scaler_lines()

    def _scaler_lines(self) -> str:
        guard = ToolGuard("fastamp.debug.trace", "leaves gradient scalers out")
        lines: str = guard.run(as_lines, self._scalers, default="")
        return lines

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Everything recorded: ``ops`` (one mapping per row), ``totals``, ``gradient_casts``.

        And ``scalers``: ``enabled``, ``scale`` now, ``skipped_steps`` and ``history`` of each, the
        last iterations as ``GradScaler.history`` returns them. Reading them waits for the device.
        ``kept_casts``: ``copies`` and ``bytes`` that :func:`fastamp.casts.keep` holds now.
        """
        record: dict[str, Any] = json.loads(self._recorder.json())
        guard = ToolGuard("fastamp.debug.trace", "leaves gradient scalers out")
        record["scalers"] = guard.run(lambda: [describe(s) for s in self._scalers], default=[])
        copies, size = _C.kept_casts()
        record["kept_casts"] = {"copies": copies, "bytes": size}
        return record

    def _page(self) -> str:
        return page_of(self.rows, self.totals, self._scaler_lines().splitlines())

    def plot(self, path: str | os.PathLike[str] | None = None, *, row_limit: int = 20) -> Figure:
        """Draws the casts of each op, made and avoided, and their size.

        Args:
            path: Image file to write; the format follows its name.
            row_limit: Ops shown at most, those with the largest casts first.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: The file cannot be written.
        """
        return draw(sums_by_op(self.rows)[:row_limit], path)
