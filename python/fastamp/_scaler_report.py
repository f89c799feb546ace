"""Reports of a gradient scaler: skipped steps, non-finite gradients, the history of the scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.amp.grad_scaler import OptState

if TYPE_CHECKING:
    from torch import Tensor

    from fastamp._scaler_records import OptimizerRecord


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


def _parameters_of(record: OptimizerRecord) -> list[tuple[str | None, Tensor]]:
    optimizer = record.optimizer()
    named: list[tuple[str | None, Tensor]] = []
    for group in () if optimizer is None else optimizer.param_groups:
        parameters = list(group["params"])
        names = group.get("param_names") or [None] * len(parameters)
        named += list(zip(names, parameters, strict=False))
    return named


def _rows_of(
    entries: list[Any], parameters: list[tuple[str | None, Tensor]]
) -> dict[int, tuple[int, int]]:
    """Returns (inf, NaN) by position of the parameter."""
    rows: dict[int, tuple[int, int]] = {}
    position_of = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
    for entry in entries:
        if isinstance(entry, tuple):
            counted, counts = entry
            positions = [position_of.get(id(parameter), len(position_of)) for parameter in counted]
        else:
            positions, counts = entry.positions, entry.counts
        for position, (inf, nan) in zip(positions, counts.tolist(), strict=True):
            if inf or nan:
                rows[position] = (inf, nan)
    return rows


def make_report(
    step: int,
    scale: float,
    overflowed: list[tuple[OptimizerRecord, list[Any]]],
    names: dict[int, str],
) -> OverflowReport:
    """Reads the counters of a skipped step; waits for the device."""
    gradients = []
    for record, entries in overflowed:
        parameters = _parameters_of(record)
        for index, (inf, nan) in sorted(_rows_of(entries, parameters).items()):
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


def was_stepped(state: dict[str, Any]) -> bool:
    """Whether an optimizer has stepped in the iteration that is not over yet."""
    return state["stage"] is OptState.STEPPED
