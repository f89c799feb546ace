# SPDX-License-Identifier: Apache-2.0
"""Rows of a report: the ops, gradients and weights of one step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import fastamp._C as _C
from fastamp._debug.check.rules import CheckReport
from fastamp._debug.watch.flops import flops_of
from fastamp._debug.watch.modules import is_readable
from fastamp._debug.watch.op_calls import OpCall

__all__ = [
    "GradientRow",
    "LossScale",
    "OpRow",
    "Rows",
    "StepRows",
    "Title",
    "WeightRow",
    "low_share",
    "name_of_dtype",
    "uses_fp16",
]

_COUNTED = (torch.float16, torch.bfloat16, torch.float32)


def name_of_dtype(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class _Error:
    """The relative distance of tensors from others."""

    def __init__(self) -> None:
        self._error = self._reference = self._own = self._product = 0.0
        self._ulps = 0.0
        self._any = False

    def add(self, tensor: torch.Tensor, reference: torch.Tensor) -> None:
        wide, other = tensor.detach().double(), reference.detach().double()
        both = wide.isfinite() & other.isfinite()
        broken = (wide.isfinite() != other.isfinite()).any().item()
        difference = (wide - other)[both]
        self._error += math.inf if broken else difference.square().sum().item()
        wide, other = wide[both], other[both]
        self._reference += other.square().sum().item()
        self._own += wide.square().sum().item()
        self._product += (wide * other).sum().item()
        if broken:
            self._ulps = math.inf
        elif difference.numel():
            worst = (difference.abs() / _units(other, tensor.dtype)).max().item()
            self._ulps = max(self._ulps, worst)
        self._any = True

    @property
    def value(self) -> float | None:
        if not self._any:
            return None
        if self._error == 0:
            return 0.0
        return math.sqrt(self._error / self._reference) if self._reference else math.inf

    @property
    def ulps(self) -> float | None:
        return self._ulps if self._any else None

    @property
    def cosine(self) -> float | None:
        if not self._any or self._error == 0:
            return 1.0 if self._any else None
        lengths = math.sqrt(self._own) * math.sqrt(self._reference)
        return self._product / lengths if lengths and math.isfinite(self._error) else 0.0


def _units(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of each float64 value to the next larger magnitude that a dtype holds."""
    numbers = torch.finfo(dtype)
    least = int(math.log2(numbers.smallest_normal))
    exponents = (torch.frexp(values).exponent - 1).clamp(min=least)
    exponents = torch.where(values == 0, torch.full_like(exponents, least), exponents)
    return torch.ldexp(torch.full_like(values, numbers.eps), exponents)


@dataclasses.dataclass(frozen=True)
class OpRow:
    """All calls of an op in one module, in one direction, for one reason, with the same dtypes.

    Attributes:
        op: Name of the op that ran, below autocast: ``"addmm"``.
        autocast_op: The op in autocast's list that it is part of, such as ``"linear"``; empty if
            none is.
        module: The innermost module; ``AdamW.step`` or the like in an optimizer's step; else empty:
            a loss, a scaler.
        backward: Whether a backward pass ran it.
        reason: Why it ran in this dtype: ``"lower"``, ``"fp32"``, ``"promote"`` (its policy),
            ``"override"`` (a policy that was changed), ``"inherited"`` (16-bit input, op in no
            list), ``"16-bit weights"``, ``"backward"`` (a 16-bit gradient) or
            ``"no 16-bit input"``.
        inputs: Dtypes of its tensors.
        output: Dtype of its first result.
        calls: How many.
        bytes: Of all arguments and results.
        flops: Of products, convolutions, attention and RNNs; else 0.
        greatest: The largest finite magnitude among its results; 0 if there is none but 0.
        least: The smallest that is not 0; 0 if there is none.
        zeros: Share of zeros among them.
        subnormals: Share of numbers that are subnormal in their dtype.
        non_finite: How many are inf or NaN.
        exponents: Number of results by exponent, ``{-3: 7}`` for seven of [1/8, 1/4).
        local_error: ||result - fp32|| / ||fp32||, fp32 being the same op on the same arguments;
            None where neither arguments nor result have 16 bits, or the op has no fp32 kernel.
        local_ulps: The largest distance of an element from that, in units of the last place of the
            result's dtype; inf where one of the two is not finite. 0.5 is correctly rounded.
        local_cosine: Of the angle between the two; 0 where one is not finite.
        error: As ``local_error``, fp32 being what it would be if the whole step ran in fp32.
    """

    op: str
    autocast_op: str
    module: str
    backward: bool
    reason: str
    inputs: tuple[str, ...]
    output: str
    calls: int
    bytes: int
    flops: int
    greatest: float
    least: float
    zeros: float
    subnormals: float
    non_finite: int
    exponents: dict[int, int]
    local_error: float | None
    local_ulps: float | None
    local_cosine: float | None
    error: float | None

    @property
    def is_low(self) -> bool:
        """Whether it computes in 16 bits, by its first input; ops that make tensors have none."""
        return self.inputs[:1] in (("float16",), ("bfloat16",))


def low_share(rows: Iterable[OpRow]) -> float | None:
    """The share of the FLOPs of products that is computed in 16 bits; None without products."""
    products = [row for row in rows if row.flops]
    flops = sum(row.flops for row in products)
    return sum(row.flops for row in products if row.is_low) / flops if flops else None


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter, as backward left it: scaled, before clipping.

    Attributes:
        name: Of the parameter.
        dtype: Of the gradient.
        greatest: As in :class:`OpRow`; likewise the next four.
        least: The smallest magnitude that is not 0.
        zeros: Share of zeros.
        subnormals: Share of numbers that are subnormal in fp16, whatever the dtype.
        exponents: Numbers by exponent.
        lost: Share of zeros of which the fp32 twin is not 0: they have underflowed.
        error: As in :class:`OpRow`.
    """

    name: str
    dtype: str
    greatest: float
    least: float
    zeros: float
    subnormals: float
    exponents: dict[int, int]
    lost: float | None
    error: float | None


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """Effect of the optimizer's step on one parameter.

    Attributes:
        name: Of the parameter.
        dtype: Its own.
        stalled: Share of the elements with a gradient that is not 0 which kept their value: the
            update was below half a unit of the dtype.
        update: ||update|| / ||weight||.
    """

    name: str
    dtype: str
    stalled: float
    update: float


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Position of the loss scale of a step with fp16 gradients, and its range.

    Of all fp16 tensors that the backward pass made, with the scale in them; shares are those of the
    fp32 twin's numbers, so that what has underflowed counts.

    Attributes:
        scale: The scale now; 1 without a scaler.
        headroom: How many times it may be doubled until a gradient overflows; negative if one has.
        smallest_scale: From here on, upwards, at most 0.1 % of the numbers underflow.
        largest_scale: Up to here none overflows.
        underflows: Share of numbers that underflow, by scale.
    """

    scale: float
    headroom: int
    smallest_scale: float | None
    largest_scale: float
    underflows: dict[float, float]


@dataclasses.dataclass(frozen=True)
class Title:
    """Title: what a report is of.

    Attributes:
        program: As on the command line; empty where a function was inspected.
        step: Its number, from 0.
        dtype: In which most of the work of products is done; empty without products.
        date: When, in UTC.
    """

    program: str = ""
    step: int = 0
    dtype: str = ""
    date: str = ""

    def __str__(self) -> str:
        """Returns a line."""
        what = f"Step {self.step} of {self.program}" if self.program else "One training step"
        return ", ".join(filter(None, (what, self.dtype, self.date)))


_KEPT_SHARE = 1e-3
_SHIFTS = range(-16, 17, 2)


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The fields of :class:`InspectReport`, of which its tables, text and page are made."""

    ops: tuple[OpRow, ...]
    gradients: tuple[GradientRow, ...]
    weights: tuple[WeightRow, ...]
    skipped: bool
    loss_scale: LossScale | None
    check: CheckReport
    title: Title = Title()


def uses_fp16(report: StepRows) -> bool:
    """Whether anything in a step is in fp16, so that where that ends is of interest."""
    dtypes = {row.output for row in report.ops} | {row.dtype for row in report.gradients}
    return "float16" in dtypes


class _OpSum:
    def __init__(self) -> None:
        self.calls = self.bytes = self.flops = 0
        self.range = _C.NumberRange()
        self.dtype = torch.float32
        self.local, self.error = _Error(), _Error()


class Rows:
    """Adds up what a step does, call by call."""

    def __init__(self) -> None:
        """Knows no call."""
        self._sums: dict[tuple[Any, ...], _OpSum] = {}
        self._edges = _C.NumberRange()
        self._twin_edges = _C.NumberRange()

    def add(self, call: OpCall, result: Any, on_same: Any, on_twin: Any) -> None:
        """Notes a call, and what fp32 makes of it."""
        if call.is_view or call.func.namespace == "prim" or call.op.startswith("empty"):
            return
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)] or call.written
        given = call.tensors
        tensors = (*made, *given)
        if not made or not all(map(is_readable, tensors)):
            return
        inputs = tuple(name_of_dtype(t.dtype) for t in given)
        autocast_op = call.autocast[0] if call.autocast else ""
        output = made[0]
        key = (
            call.op,
            autocast_op,
            call.module,
            call.backward,
            call.reason,
            inputs,
            name_of_dtype(output.dtype),
        )
        row = self._sums.setdefault(key, _OpSum())
        row.calls += 1
        row.dtype = output.dtype
        row.bytes += sum(t.numel() * t.element_size() for t in tensors)
        row.flops += flops_of(call.func, call.args, call.kwargs, result)
        with torch.no_grad():
            if output.dtype in _COUNTED:
                found = _C.NumberRange.of(output.detach())
                row.range += found
                if call.backward and output.dtype is torch.float16:
                    self._edges += found
                    twin = _first(on_twin)
                    wide = output.detach() if twin is None else twin
                    self._twin_edges += _C.NumberRange.of(wide.detach().float())
            _add_error(row.local, output, on_same)
            _add_error(row.error, output, on_twin)

    def dtype_of_products(self) -> str:
        """The dtype in which most of the work of products is done; empty without products."""
        flops: dict[str, int] = {}
        for key, row in self._sums.items():
            if row.flops and key[5]:
                flops[key[5][0]] = flops.get(key[5][0], 0) + row.flops
        return max(flops, key=lambda name: flops[name], default="")

    def op_rows(self) -> tuple[OpRow, ...]:
        """Returns a row for each kind of call, in the order of the first."""
        return tuple(_op_row(key, row) for key, row in self._sums.items())

    def loss_scale(self, scale: float) -> LossScale | None:
        """Returns where the scale may be; None without fp16 gradients."""
        if self._edges.elements == 0:
            return None
        twin = self._twin_edges
        shift = twin.largest_shift(torch.float16)
        if shift is None:
            return None
        born_zero = twin.zeros / max(twin.elements, 1)

        def lost(doublings: int) -> float:
            return max(twin.share_of_zeros(torch.float16, doublings) - born_zero, 0.0)

        enough = next((s for s in range(-40, shift + 1) if lost(s) <= _KEPT_SHARE), None)
        return LossScale(
            scale=scale,
            headroom=shift,
            smallest_scale=None if enough is None else math.ldexp(scale, enough),
            largest_scale=math.ldexp(scale, shift),
            underflows={math.ldexp(scale, s): lost(s) for s in _SHIFTS},
        )


def _op_row(key: tuple[Any, ...], row: _OpSum) -> OpRow:
    op, autocast_op, module, backward, reason, inputs, output = key
    return OpRow(
        op=op,
        autocast_op=autocast_op,
        module=module,
        backward=backward,
        reason=reason,
        inputs=inputs,
        output=output,
        calls=row.calls,
        bytes=row.bytes,
        flops=row.flops,
        non_finite=row.range.inf + row.range.nan,
        local_error=row.local.value,
        local_ulps=row.local.ulps,
        local_cosine=row.local.cosine,
        error=row.error.value,
        **_numbers(row.range, row.dtype),
    )


def _first(tree: Any) -> torch.Tensor | None:
    return next((t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)), None)


def _add_error(error: _Error, output: torch.Tensor, reference: Any) -> None:
    other = _first(reference)
    if other is not None and output.is_floating_point() and other.shape == output.shape:
        error.add(output, other)


def _numbers(found: _C.NumberRange, dtype: torch.dtype) -> dict[str, Any]:
    elements = max(found.elements, 1)
    counted = dtype if dtype in _COUNTED else torch.float32
    return {
        "greatest": found.greatest,
        "least": found.least,
        "zeros": found.zeros / elements,
        "subnormals": found.share_of_subnormals(counted),
        "exponents": exponents_of(found),
    }


def exponents_of(found: _C.NumberRange) -> dict[int, int]:
    """Numbers by exponent, without the empty ones."""
    counts = {exponent: found.at_exponent(exponent) for exponent in range(-127, 128)}
    return {exponent: count for exponent, count in counts.items() if count}


def gradient_row(
    name: str, gradient: torch.Tensor, twin: torch.Tensor | None
) -> GradientRow | None:
    """Returns the row of a gradient; None of one that has no exponents to count."""
    if not is_readable(gradient):
        return None
    with torch.no_grad():
        wide = gradient.detach()
        wide = wide if wide.dtype in _COUNTED else wide.float()
        found = _C.NumberRange.of(wide)
        error, lost = _Error(), None
        if twin is not None:
            error.add(gradient, twin)
            lost = ((wide == 0) & (twin != 0)).sum().item() / max(wide.numel(), 1)
    return GradientRow(
        name,
        name_of_dtype(gradient.dtype),
        **_numbers(found, torch.float16),
        lost=lost,
        error=error.value,
    )


def weight_row(
    name: str, before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor
) -> WeightRow:
    """Returns what a step did to a parameter."""
    with torch.no_grad():
        moved = gradient.to(before.device) != 0
        stalled = ((before == after) & moved).sum().item() / max(int(moved.sum().item()), 1)
        weight = before.double().norm().item()
        update = (after.double() - before.double()).norm().item()
    ratio = update / weight if weight else math.inf if update else 0.0
    return WeightRow(name, name_of_dtype(before.dtype), stalled, ratio)
