# SPDX-License-Identifier: Apache-2.0
"""Reports of a gradient scaler: skipped steps, non-finite gradients, the history of the scale."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import fastamp._C as _C

if TYPE_CHECKING:
    from torch import Tensor


_WHICH_OP = "In which op it began: python -m fastamp --inspect - --at-first-{} PROGRAM"
_GONE = "  (The optimizer is gone, and the names of its parameters with it.)"


class StepRecord(NamedTuple):
    """One iteration as ``GradScaler.history`` returns it."""

    step: int
    """Number of the iteration, from 0 for the scaler's first."""
    scale: float
    """The scale that the iteration's gradients were made with."""
    skipped: bool
    """Whether an optimizer had non-finite gradients."""
    norm: float
    """2-norm of the unscaled, unclipped gradients of all optimizers; NaN if not computed."""
    growth_tracker: int
    """Clean iterations in a row after this one."""


@dataclass(frozen=True)
class NonFiniteGradient:
    """A gradient that had inf or NaN, or has when it is unscaled."""

    name: str
    """From ``named_parameters``, the optimizer's ``param_names``, or "parameter 3"."""
    index: int
    """Position among all parameters of the optimizer, from 0."""
    shape: tuple[int, ...] | None
    """Name of the parameter; ``None`` if the optimizer is gone."""
    inf: int
    """Elements that were inf or -inf, or are when they are divided by the scale."""
    nan: int
    """Elements that were NaN."""
    rank: int | None = None
    """Number of the process that had it; ``None`` if the report is of this one alone."""


@dataclass(frozen=True)
class OverflowReport:
    """Gradients that were not finite at the last skipped step. False if no step was skipped."""

    step: int | None = None
    """Number of the iteration, as in :class:`StepRecord`; ``None``: none was skipped."""
    scale: float | None = None
    """The scale that it used; ``None`` too of a :class:`fastamp.StepGuard`, which has none."""
    gradients: list[NonFiniteGradient] = field(default_factory=list)
    """Gradients in the order of the ranks, the optimizers and their parameters."""
    more: int = 0
    """Further gradients with inf or NaN on other ranks, which have not sent their names."""
    cause: str = ""
    """Op in which it began, if :func:`fastamp.debug.check` or ``inspect`` saw that step; a line."""

    def __bool__(self) -> bool:
        """Whether a step was skipped."""
        return self.step is not None

    def __str__(self) -> str:
        """Returns a table, most non-finite elements first."""
        if self.step is None:
            return "No step was skipped."
        count = len(self.gradients) + self.more
        at_scale = "" if self.scale is None else f" at scale {self.scale:g}"
        head = (
            f"Step {self.step} was skipped{at_scale}: "
            f"{count} gradient{'' if count == 1 else 's'} with inf or NaN."
        )
        width = max((len(gradient.name) for gradient in self.gradients), default=0)
        ordered = sorted(self.gradients, key=lambda g: -(g.inf + g.nan))
        lines = [
            f"  {'' if g.rank is None else f'rank {g.rank}  '}{g.name:{width}}  "
            f"{'' if g.shape is None else g.shape}  inf {g.inf}  NaN {g.nan}"
            for g in ordered
        ]
        if self.more:
            lines.append(f"  and {self.more} more")
        which = _WHICH_OP.format("nonfinite" if self.scale is None else "skip")
        began = f"Cause: {self.cause}" if self.cause else which
        return "\n".join([head, *lines, *_hint(self.gradients), began])

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data, for logs and checkpoints.

        The cause is left out, and so is the rank in a report of one process.
        """
        data = asdict(self)
        del data["cause"]
        for gradient in data["gradients"]:
            if gradient["rank"] is None:
                del gradient["rank"]
        if not self.more:
            del data["more"]
        return data

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes :meth:`as_dict` as JSON, for ``python -m fastamp merge``.

        Args:
            path: The file. Of several processes that train together each writes one of its own:
                ``overflow.rank1.json``, and notes its rank there.

        Returns:
            The file.

        Raises:
            OSError: It cannot be written.
        """
        file, report, distributed = Path(path), self, torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank()
            file = file.with_name(f"{file.stem}.rank{rank}{file.suffix}")
            report = replace(self, gradients=[replace(g, rank=rank) for g in self.gradients])
        file.write_text(json.dumps(report.as_dict()), encoding="utf-8")
        return file


@dataclass(frozen=True)
class ZerosOfGradient:
    """A gradient that had zeros."""

    name: str
    """Name as in :class:`NonFiniteGradient`."""
    index: int
    """Position among all parameters of the optimizer, from 0."""
    shape: tuple[int, ...] | None
    """Name of the parameter; ``None`` if the optimizer is gone."""
    zeros: int
    """Elements that were 0."""
    elements: int
    """Elements that were counted: all of them or a sample, see :class:`UnderflowReport`."""


class UnderflowReport:
    """Gradient elements that were 0, at the step that was counted last.

    False if no gradients were counted. A gradient that is too small for fp16 arrives as 0. So does
    one that is 0 by nature: of a unit that a ReLU has turned off, of a row of an embedding that the
    batch does not use.

    Of an optimizer with 65536 elements or more a sample is counted, so that counting takes little
    of a pass: as many blocks of 2048 elements as have 32768 elements, and at least each 128th;
    others at each time. Gradients with none in it are left out, and ``range.elements`` is less than
    :attr:`elements`.

    Attributes:
        gradients: Those with zeros, in the order of the optimizers and their parameters.
    """

    def __init__(self, native: _C.UnderflowReport, gradients: list[ZerosOfGradient]) -> None:
        """Keeps what was counted."""
        self._native = native
        self.gradients = gradients

    @property
    def step(self) -> int | None:
        """Number of the iteration, as in :class:`StepRecord`; ``None``: none was counted."""
        return self._native.step if self else None

    @property
    def scale(self) -> float | None:
        """The scale that the gradients carried."""
        return self._native.scale if self else None

    @property
    def range(self) -> _C.NumberRange:
        """Magnitudes of all elements that were counted, the scale in them, by exponents."""
        return self._native.range

    @property
    def elements(self) -> int:
        """Number of elements of the gradients, counted or not."""
        return self._native.elements

    def share_of_zeros(self, scale: float | None = None) -> float:
        """The share of elements, from 0 to 1, that are 0 or would be in fp16 at another scale.

        What is 0 already counts as 0 at any scale: whether a larger one would have saved it cannot
        be reported.

        Args:
            scale: Another scale; what counts is the power of two next to its ratio to
                :attr:`scale`. ``None``: the share now.

        Raises:
            ValueError: ``scale`` is not a finite number above 0.
        """
        if scale is None or not self:
            return self.range.share_of_zeros(torch.float16)
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(
                f"share_of_zeros: expected scale to be a finite number above 0, got {scale!r}"
            )
        return self._native.share_of_zeros(scale)

    @property
    def largest_scale(self) -> float | None:
        """The largest scale at which all that was counted is finite in fp16.

        A power of two times :attr:`scale`; ``None`` if they are all 0. Gradients of activations may
        be larger; the scaler does not see them, :func:`fastamp.debug.inspect` does.
        """
        return self._native.largest_scale() or None if self else None

    def __bool__(self) -> bool:
        """Whether gradients were counted."""
        return self._native.step >= 0

    def __str__(self) -> str:
        """Returns some sentences and a table, the largest share of zeros first."""
        if not self:
            return "No gradients were counted."
        zeros, elements = self.range.zeros, self.range.elements
        sample = f", in a sample of {self.elements}" if self.elements > elements else ""
        head = (
            f"Step {self.step} at scale {self.scale:g}: {zeros} of {elements} gradient elements "
            f"({100 * self.share_of_zeros():.3g} %) are 0{sample}."
        )
        if self.largest_scale is not None:
            head += f" Finite in fp16 up to scale {self.largest_scale:g}."
        width = max((len(gradient.name) for gradient in self.gradients), default=0)
        ordered = sorted(self.gradients, key=lambda g: -g.zeros / g.elements)
        lines = [
            f"  {g.name:{width}}  {'' if g.shape is None else g.shape}  "
            f"zeros {g.zeros} of {g.elements}"
            for g in ordered
        ]
        return "\n".join([head, *lines, *_hint(self.gradients)])

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data, for logs."""
        return {
            "step": self.step,
            "scale": self.scale,
            "zeros": self.range.zeros,
            "elements": self.range.elements,
            "all_elements": self.elements,
            "largest_scale": self.largest_scale,
            "gradients": [asdict(gradient) for gradient in self.gradients],
        }


def _hint(gradients: Iterable[NonFiniteGradient | ZerosOfGradient]) -> list[str]:
    """Returns why parameters have no names, if some have none."""
    return [_GONE] if any(gradient.shape is None for gradient in gradients) else []


#: What comes of reading objects that are others than were expected: tensors among them.
UNREADABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


def report_from_dict(data: Any, function: str, name: str) -> OverflowReport:
    """Makes a report of what ``as_dict`` returned.

    Args:
        data: That.
        function: Who reads it, for the message.
        name: Of the argument or file, likewise.

    Raises:
        ValueError: It is something else.
    """
    try:
        gradients = [
            NonFiniteGradient(**{**entry, "shape": entry["shape"] and tuple(entry["shape"])})
            for entry in data["gradients"]
        ]
        if data["step"] is None:
            return OverflowReport()
        scale = None if data["scale"] is None else float(data["scale"])
        return OverflowReport(int(data["step"]), scale, gradients, int(data.get("more", 0)))
    except UNREADABLE as error:
        raise ValueError(
            f"{function}: expected {name} to be what OverflowReport.as_dict returned, got "
            f"{data!r:.200}"
        ) from error


def _named_parameters_of(optimizer: Any) -> list[tuple[str | None, Tensor]]:
    named: list[tuple[str | None, Tensor]] = []
    for group in () if optimizer is None else optimizer.param_groups:
        parameters = list(group["params"])
        names = group.get("param_names") or [None] * len(parameters)
        named += list(zip(names, parameters, strict=False))
    return named


def make_report(
    step: int,
    scale: float | None,
    overflowed: list[tuple[Any, list[tuple[int, int, int]]]],
    names: dict[int, str],
) -> OverflowReport:
    """Gives names to what was counted.

    Args:
        step: Number of the iteration.
        scale: That it used; ``None``: a guard has none.
        overflowed: (optimizer, or ``None`` if it is gone; rows of position, inf and NaN).
        names: By the identity of the parameter.
    """
    gradients = [
        NonFiniteGradient(*described, inf, nan)
        for described, (inf, nan) in _described(overflowed, names)
    ]
    return OverflowReport(step, scale, gradients)


def make_underflow_report(
    native: _C.UnderflowReport,
    counted: list[tuple[Any, list[tuple[int, int, int]]]],
    names: dict[int, str],
) -> UnderflowReport:
    """Gives names to what was counted: rows of position, zeros and elements."""
    gradients = [
        ZerosOfGradient(*described, zeros, elements)
        for described, (zeros, elements) in _described(counted, names)
    ]
    return UnderflowReport(native, gradients)


def _described(
    counted: list[tuple[Any, list[tuple[int, int, int]]]], names: dict[int, str]
) -> Iterator[tuple[tuple[str, int, tuple[int, ...] | None], tuple[int, int]]]:
    """Yields name, index and shape of each parameter with what was counted of its gradient."""
    for optimizer, rows in counted:
        parameters = _named_parameters_of(optimizer)
        for index, *counts in rows:
            name, parameter = parameters[index] if index < len(parameters) else (None, None)
            name = names.get(id(parameter)) or name or f"parameter {index}"
            shape = None if parameter is None else tuple(parameter.shape)
            yield (name, index, shape), (counts[0], counts[1])


def names_by_identity(named_parameters: Any, function: str = "overflow_report") -> dict[int, str]:
    """Reads ``named_parameters``: pairs of name and tensor, or a module."""
    if named_parameters is None:
        return {}
    if hasattr(named_parameters, "named_parameters"):
        named_parameters = named_parameters.named_parameters()
    expected = f"{function}: expected named_parameters to be pairs of name and parameter, got "
    if not isinstance(named_parameters, Iterable):
        raise TypeError(expected + type(named_parameters).__name__)
    names = {}
    for pair in named_parameters:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"{expected}a {type(pair).__name__} in a {type(named_parameters).__name__}"
            )
        names[id(pair[1])] = pair[0]
    return names


def caller_level() -> int:
    """Returns the stacklevel of the user's frame: a warning names the line that called us."""
    package = str(Path(__file__).parent.parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def warn_of_overflows(what: str | None) -> None:
    """Warns of what the core says: gradients overflow, or the scale has no inverse."""
    if what is not None:
        warnings.warn(
            f"GradScaler: {what}. Look at scaler.overflow_report(model.named_parameters()) for "
            "the parameters concerned, at the loss and the inputs of that step for NaN, and at "
            "scaler.history() for when it began; a learning rate that is too high, a division by "
            "zero and a log or sqrt of zero are common causes.",
            stacklevel=caller_level(),
        )


def warn_of_scaled_gradients(function: str) -> None:
    """Warns that gradients come from a backward pass after ``unscale_``."""
    warnings.warn(
        f"{function}: expected the gradients that unscale_() has divided by the scale, got "
        "others, and scale() was called since: they are probably scaled. After an "
        "iteration that was broken off, call update() before the next; to replace unscaled "
        "gradients, write into them.",
        stacklevel=caller_level(),
    )
