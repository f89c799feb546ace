# SPDX-License-Identifier: Apache-2.0
"""What autocast did: ops, dtypes, casts."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp._json_report import JsonReport
from fastamp._tool_guard import ToolGuard
from fastamp._trace.scalers import as_lines, describe, listen, stop_listening

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TraceRow", "trace"]

_PACKAGES = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1])
_C.skip_source_folders([str(folder) + os.sep for folder in _PACKAGES])


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """All calls of one op that looked the same to autocast.

    Attributes:
        op: Name with overload as in :func:`fastamp.op_table`: ``"mm"``, ``"softmax.int"``.
        device: Whose policy was applied, ``"cpu"`` or ``"cuda"``.
        policy: The policy in force for these calls.
        inputs: Dtypes of the tensor arguments as given, in order.
        run_dtype: Dtype that castable arguments had when the op ran; empty without tensors.
        float8: In an fp8 region, of ops that can run in fp8: ``"float8"`` if they did (the casts
            are to fp8, the result is in ``run_dtype``), else why not. Empty elsewhere.
        source: ``"file:line"`` of the Python call with ``source=True``, else empty. Empty too for
            calls without Python code of the user around them, as in backward passes.
        calls: How often the op was called like this.
        weight_casts: Casts made of float32 parameters for these calls.
        other_casts: Casts made of inputs, activations and anything else.
        cast_bytes: Size of the casts made, in bytes.
        cache_hits: Casts of weights found in the cache of the region.
        activation_hits: Casts of activations that shared the memory of an earlier one.
        kept_hits: Casts of weights kept from an earlier region.
    """

    op: str
    device: str
    policy: str
    inputs: tuple[str, ...]
    run_dtype: str
    float8: str
    source: str
    calls: int
    weight_casts: int
    other_casts: int
    cast_bytes: int
    cache_hits: int
    activation_hits: int
    kept_hits: int

    @property
    def casts(self) -> int:
        """Casts made, of weights and of anything else."""
        return self.weight_casts + self.other_casts


_COUNTS = (
    "weight_casts",
    "other_casts",
    "cast_bytes",
    "cache_hits",
    "activation_hits",
    "kept_hits",
)


class trace(JsonReport):  # noqa: N801 (used like torch.no_grad)
    """Records every op call that fastamp's autocast kernels handle inside a ``with`` block.

    ::

        with fastamp.trace() as t:
            train_step()
        print(t)

    Calls of all threads of the process are recorded, those of backward passes included. Blocks may
    nest and overlap; each records all calls. A block that is entered again adds to what it has.
    Code that was compiled or exported runs no autocast kernels and is not seen; the profiler of
    torch sees it. While no trace is open nothing is recorded and nothing is slower.

    Gradient scalers that are made inside a block are reported too, with their scale and skipped
    steps; the trace keeps them alive.

    Args:
        source: Tell calls apart by the line of Python that made them. Costs some microseconds per
            op call while the trace is open.
        scaler: A gradient scaler, made before the block, that is to be reported too.

    Raises:
        TypeError: ``source`` is not a bool, or ``scaler`` no gradient scaler.
    """

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
        self._guard = ToolGuard("fastamp.trace", "is incomplete")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends recording; what was recorded stays."""
        self._guard.run_always(self._recorder.stop)
        self._guard.run_always(stop_listening, self._scalers)

    @property
    def rows(self) -> list[TraceRow]:
        """What was recorded so far, in no particular order. May be read while the trace is open."""
        return [TraceRow(**row) for row in self._recorder.rows()]

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all rows: ``calls`` and the counts of casts; and those of gradient casts.

        ``gradient_casts`` and ``gradient_cast_bytes`` are the casts of gradients back to the dtype
        of what was cast, made by backward passes.
        """
        rows = self.rows
        totals = {name: sum(getattr(row, name) for row in rows) for name in ("calls", *_COUNTS)}
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
        return self._recorder.table(sort_by, row_limit) + self._scaler_lines()

    def _scaler_lines(self) -> str:
        guard = ToolGuard("fastamp.trace", "leaves gradient scalers out")
        lines: str = guard.run(as_lines, self._scalers, default="")
        return lines

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Everything recorded: ``ops`` (one mapping per row), ``totals``, ``gradient_casts``.

        And ``scalers``: ``enabled``, ``scale`` now, ``skipped_steps`` and ``history`` of each, the
        last iterations as ``GradScaler.history`` tells them. Reading them waits for the device.
        ``kept_casts``: ``copies`` and ``bytes`` that :func:`fastamp.keep_casts` holds now.
        """
        record: dict[str, Any] = json.loads(self._recorder.json())
        guard = ToolGuard("fastamp.trace", "leaves gradient scalers out")
        record["scalers"] = guard.run(lambda: [describe(s) for s in self._scalers], default=[])
        copies, size = _C.kept_casts()
        record["kept_casts"] = {"copies": copies, "bytes": size}
        return record

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the table as a page that needs no other file; writes it, too.

        Args:
            path: A file to write it to as well.

        Raises:
            OSError: The file cannot be written.
        """
        from fastamp._trace.page import page_of

        text = page_of(self, self._scaler_lines().splitlines())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

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
        from fastamp._trace.plot import draw

        return draw(_by_op(self.rows)[:row_limit], path)


def _by_op(rows: Iterable[TraceRow]) -> list[tuple[str, dict[str, int]]]:
    """Counts per op over all dtypes and lines, largest casts first."""
    sums: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = sums.setdefault(row.op, dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            counts[name] += getattr(row, name)
    return sorted(sums.items(), key=lambda item: (-item[1]["cast_bytes"], item[0]))
