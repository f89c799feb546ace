# SPDX-License-Identifier: Apache-2.0
"""Report of a bisection."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, ClassVar

from fastamp._debug.bisect.runs import file_of
from fastamp._debug.bisect.suspects import BROKEN
from fastamp._debug.report import Report
from fastamp._policy.policy_file import PolicyFile
from fastamp._util.aligned_text import aligned

__all__ = ["BisectReport", "Fp32Op"]


@dataclasses.dataclass(frozen=True)
class Fp32Op:
    """An op that has to run in fp32.

    Attributes:
        op: As policies name it.
        module: Name of the module; "" is the model itself; None: everywhere in the program.
        modules: How many modules call it there.
        calls: How many there are in a step.
        local_error: How far the worst element of its results is from the same op in fp32 on the
            same arguments, relative to the larger of both; 1e6 if only one is finite; None if the
            op's fp32 is not known.
        cost: Share by which its own calls in forward passes make the step longer, as ``cost`` of
            :class:`BisectReport`.
    """

    op: str
    module: str | None
    modules: int
    calls: int
    local_error: float | None
    cost: float


@dataclasses.dataclass(frozen=True)
class BisectReport(Report):
    """Report of :func:`fastamp.debug.bisect`.

    Agreement of gradients is ``2 a.b / (a.a + b.b)``: the cosine if both are equally long, 1 if
    they are equal, 0 if one is inf or NaN.

    Attributes:
        ops: What has to run in fp32; empty if the step agrees as it is.
        agree: What was asked for.
        before: Agreement of the step as it is with fp32.
        after: The same with the ops in fp32.
        noise: The same of fp32 with itself: no more can be seen.
        low: Ops that run in 16 bits without autocast, too: what they do wrong is not seen.
        all_fp32: Agreement with each op in fp32 that policies can bring there; None if that was not
            needed.
        cost: Share by which the step becomes longer, forward and backward, with ops that become
            fp32 because their inputs are. Predicted from memory traffic and FLOPs, for a GPU with
            tensor cores; not measured.
        runs: How often the step ran.
        is_complete: Whether the search came to its end: False if it used up the runs, so that
            fewer or cheaper ops might do.
    """

    kind: ClassVar[str] = "bisect"

    ops: tuple[Fp32Op, ...]
    agree: float
    before: float
    after: float
    noise: float
    low: tuple[str, ...]
    all_fp32: float | None
    cost: float
    runs: int
    is_complete: bool

    @property
    def policies(self) -> PolicyFile:
        """The policies: ``ops`` for the whole program, ``modules`` by name."""
        return file_of((each.op, each.module) for each in self.ops)

    def __bool__(self) -> bool:
        """Whether anything has to run in fp32."""
        return bool(self.ops)

    def summary(self) -> str:
        """Returns the agreement before and after, and what was run, in a few lines."""
        lines = [f"Gradients agree with fp32's to {_text(self.before)}; asked for: {self.agree:g}"]
        if self.ops:
            lines.append(f"With the ops below in fp32: {_text(self.after)}")
            more = f"{self.cost:.1%} more time"
            lines.append(f"Predicted: {more}, with ops that become fp32 after these")
        else:
            lines.append("Nothing has to run in fp32")
        everything = "" if self.all_fp32 is None else f", all ops in fp32: {_text(self.all_fp32)}"
        lines.append(f"{self.runs} runs; fp32 with itself: {_text(self.noise)}{everything}")
        if self.low:
            lines.append(f"In 16 bits without autocast, too, and so not compared: {_few(self.low)}")
        if not self.is_complete:
            lines.append("The runs were used up: fewer or cheaper ops might do")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Returns the summary and a table of the ops."""
        if not self.ops:
            return self.summary()
        table = [("op", "in", "calls", "local error", "cost")]
        for each in self.ops:
            error = "?" if each.local_error is None else f"{each.local_error:.2g}"
            error = "inf" if each.local_error == BROKEN else error
            table.append((each.op, _place(each), str(each.calls), error, f"{each.cost:.1%}"))
        return "\n".join([self.summary(), "", *aligned(table, text_columns=(0, 1))])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the policies as a file for ``--policy`` and :func:`fastamp.policies.for_modules`.

        The latter takes ``[ops]`` for ops inside of the model only.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(self.policy_text(), encoding="utf-8")

    def policy_text(self) -> str:
        """Returns what :meth:`write` writes."""
        return self.policies.toml(comment=f"fastamp bisect\n{self.summary()}")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: the attributes."""
        return dataclasses.asdict(self)


def _place(each: Fp32Op) -> str:
    if each.module is None:
        return f"{each.modules} modules" if each.modules > 1 else "everywhere"
    return each.module or "the model itself"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _text(agreement: float) -> str:
    """Rounded down, so that what is not 1 does not look so."""
    return f"{math.floor(round(agreement, 12) * 1e5) / 1e5:.5f}"
