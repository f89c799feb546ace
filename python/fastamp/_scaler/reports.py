# SPDX-License-Identifier: Apache-2.0
"""Reports of a gradient scaler: skipped steps, non-finite gradients, the history of the scale."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class StepRecord(NamedTuple):
    """One iteration as ``GradScaler.history`` tells it."""

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
    """A gradient that had inf or NaN."""

    name: str
    """From ``named_parameters``, the optimizer's ``param_names``, or "parameter 3"."""
    index: int
    """Position among all parameters of the optimizer, from 0."""
    shape: tuple[int, ...] | None
    """Of the parameter; ``None`` if the optimizer is gone."""
    inf: int
    """Elements that were inf or -inf."""
    nan: int
    """Elements that were NaN."""


@dataclass(frozen=True)
class OverflowReport:
    """What was not finite at the last skipped step. False if no step was skipped."""

    step: int | None = None
    """Number of the iteration, as in :class:`StepRecord`; ``None``: none was skipped."""
    scale: float | None = None
    """The scale that it used."""
    gradients: list[NonFiniteGradient] = field(default_factory=list)
    """In the order of the optimizers and their parameters."""

    def __bool__(self) -> bool:
        """Whether a step was skipped."""
        return self.step is not None

    def __str__(self) -> str:
        """Returns a table, most non-finite elements first."""
        if self.step is None:
            return "No step was skipped."
        count = len(self.gradients)
        head = (
            f"Step {self.step} was skipped at scale {self.scale:g}: "
            f"{count} gradient{'' if count == 1 else 's'} with inf or NaN."
        )
        width = max((len(gradient.name) for gradient in self.gradients), default=0)
        ordered = sorted(self.gradients, key=lambda g: -(g.inf + g.nan))
        lines = [
            f"  {g.name:{width}}  {'' if g.shape is None else g.shape}  inf {g.inf}  NaN {g.nan}"
            for g in ordered
        ]
        return "\n".join([head, *lines])

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data, for logs and checkpoints."""
        return asdict(self)


def report_from_dict(data: Any) -> OverflowReport:
    """Makes a report of what ``as_dict`` returned.

    Raises:
        ValueError: It is something else.
    """
    try:
        gradients = [
            NonFiniteGradient(**{**entry, "shape": entry["shape"] and tuple(entry["shape"])})
            for entry in data["gradients"]
        ]
        return OverflowReport(int(data["step"]), float(data["scale"]), gradients)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            'load_state_dict: expected state_dict["overflow_report"] to be None or what '
            f"OverflowReport.as_dict returned, got {data!r:.200}"
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
    scale: float,
    overflowed: list[tuple[Any, list[tuple[int, int, int]]]],
    names: dict[int, str],
) -> OverflowReport:
    """Gives names to what was counted.

    Args:
        step: Number of the iteration.
        scale: That it used.
        overflowed: (optimizer, or ``None`` if it is gone; rows of position, inf and NaN).
        names: By the identity of the parameter.
    """
    gradients = []
    for optimizer, rows in overflowed:
        parameters = _named_parameters_of(optimizer)
        for index, inf, nan in rows:
            name, parameter = parameters[index] if index < len(parameters) else (None, None)
            name = names.get(id(parameter)) or name or f"parameter {index}"
            shape = None if parameter is None else tuple(parameter.shape)
            gradients.append(NonFiniteGradient(name, index, shape, inf, nan))
    return OverflowReport(step, scale, gradients)


def names_by_identity(named_parameters: Any) -> dict[int, str]:
    """Reads ``named_parameters``: pairs of name and tensor, or a module."""
    if named_parameters is None:
        return {}
    if hasattr(named_parameters, "named_parameters"):
        named_parameters = named_parameters.named_parameters()
    if not isinstance(named_parameters, Iterable):
        raise TypeError(
            "overflow_report: expected named_parameters to be pairs of name and parameter, got "
            f"{type(named_parameters).__name__}"
        )
    return {id(parameter): name for name, parameter in named_parameters}


def _caller_level() -> int:
    """Returns the stacklevel of the user's frame: a warning names the line that called us."""
    package = str(Path(__file__).parent.parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def warn_of_overflows(what: str | None) -> None:
    """Warns that gradients overflow for a reason that a smaller scale does not cure."""
    if what is not None:
        warnings.warn(
            f"GradScaler: {what}, so gradients are inf or NaN for a reason that a smaller scale "
            "does not cure. Look at scaler.overflow_report(model.named_parameters()) for the "
            "parameters concerned, at the loss and the inputs of that step for NaN, and at "
            "scaler.history() for when it began; a learning rate that is too high, a division by "
            "zero and a log or sqrt of zero are common causes.",
            stacklevel=_caller_level(),
        )


def warn_of_scaled_gradients(function: str) -> None:
    """Warns that gradients come from a backward pass after ``unscale_``."""
    warnings.warn(
        f"{function}: expected the gradients that unscale_() has divided by the scale, got "
        "others, and scale() was called since: they are probably scaled. After an "
        "iteration that was broken off, call update() before the next; to replace unscaled "
        "gradients, write into them.",
        stacklevel=_caller_level(),
    )
