# SPDX-License-Identifier: Apache-2.0
"""Suspects: ops of a step that may be at fault, how much so, and their cost in fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fastamp._debug.bisect.traffic import time_of
from fastamp._debug.watch.flops import flops_of
from fastamp._debug.watch.modules import is_half, is_readable
from fastamp._debug.watch.op_calls import OpCall, OpWatcher
from fastamp._debug.watch.twin import Fp32Twin
from fastamp._policy.table import BUILT_IN_OPS, LOWERING

__all__ = ["BROKEN", "Suspect", "Suspects"]

#: Stands for the error of numbers that are inf or NaN here and not in fp32, or the reverse.
BROKEN = 1e6
#: Of ops of which no fp32 is known: more than rounding, less than what is seen to be wrong.
_UNKNOWN = 0.1


@dataclasses.dataclass
class Suspect:
    """All calls in forward passes of an op that has 16-bit arguments or results, in one module.

    Attributes:
        op: As policies name it: ``"linear"``, ``"aten::rsqrt"``, ``"mylib::rope"``.
        module: Name of the innermost module; "" is the model itself, None what is outside of it.
        calls: How many.
        is_product: Whether it is counted in FLOPs: products and convolutions.
        local_error: How far the worst element of its results is from the same op in fp32 on the
            same arguments, of the larger of both; 1e6 if one is not finite; None if not known.
        weight: The local error, times how much the ops that follow enlarge it.
        time: That fp32 adds to its calls, see ``time_of``.
    """

    op: str
    module: str | None
    calls: int = 0
    is_product: bool = False
    local_error: float | None = None
    weight: float = 0.0
    time: float = 0.0

    def add_cost(self, call: OpCall, result: Any) -> None:
        """Adds that of a call."""
        parts = (call.func, call.args, call.kwargs, result)
        self.is_product |= flops_of(*parts) > 0
        self.time += time_of(*parts, widened=True) - time_of(*parts)


@dataclasses.dataclass
class _Seen:
    suspect: Suspect | None
    local_error: float
    growth: float
    inputs: list[int]
    outputs: list[int]


class Suspects(OpWatcher):
    """Notes the ops of one step, beside an fp32 twin.

    Args:
        names: The name of a module in a model, by the name under which it is watched.
    """

    def __init__(self, names: dict[str, str]) -> None:
        """Knows no op."""
        self._names = names
        self._listed = set(BUILT_IN_OPS)
        self._twin = Fp32Twin()
        self._found: dict[tuple[str, str | None], Suspect] = {}
        self._calls: list[_Seen] = []
        self._kept: list[Any] = []

    def before(self, call: OpCall) -> Any:
        """Runs the twin of a call, and notes how far its arguments are from those of fp32."""
        if call.backward:
            return None  # follows from the forward pass
        return [self._error(t) for t in call.tensors], self._twin.before(call)

    def after(self, call: OpCall, result: Any, noted: Any) -> None:
        """Notes a call."""
        if noted is None:
            return
        errors_before, twins = noted
        given = call.tensors
        on_same, _ = self._twin.after(call, result, twins)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not made or not all(map(is_readable, (*given, *made))):
            return
        is_low = any(is_half(t) for t in (*given, *made))
        error = max((self._error(t) for t in made), default=0.0)
        before = max(errors_before, default=0.0)
        local = _worst_element(made[0], on_same) if is_low else 0.0
        suspect = None
        if is_low and not _is_harmless(call, local):
            suspect = self._note(call, local)
            suspect.add_cost(call, result)
        self._kept += [t.untyped_storage() for t in (*given, *made)]
        self._calls.append(
            _Seen(
                suspect,
                _UNKNOWN if local is None else local,
                max(1.0, error / max(before, 2.0**-12)) if not call.is_view else 1.0,
                [_memory(t) for t in given],
                [_memory(t) for t in made],
            )
        )

    def ranked(self) -> list[Suspect]:
        """Returns the suspects in the order in which to try them, and forgets the step.

        Those that compute no products come first: fp32 costs them little. Of these, the ones whose
        errors grow the most.
        """
        grown: dict[int, float] = {}
        for seen in reversed(self._calls):
            own = max((grown.get(memory, 1.0) for memory in seen.outputs), default=1.0)
            if seen.suspect is not None:
                seen.suspect.weight = max(seen.suspect.weight, own * seen.local_error)
            for memory in seen.inputs:
                grown[memory] = max(grown.get(memory, 1.0), min(own * seen.growth, BROKEN))
        self._calls, self._kept, self._twin = [], [], Fp32Twin()
        return sorted(self._found.values(), key=lambda each: (each.is_product, -each.weight))

    def _note(self, call: OpCall, local: float | None) -> Suspect:
        op = call.autocast[0] if call.autocast else call.op
        if op not in self._listed and "::" not in op:
            op = f"aten::{op}"
        module = self._names.get(call.module) if call.module else None
        suspect = self._found.setdefault((op, module), Suspect(op, module))
        suspect.calls += 1
        if local is not None:
            suspect.local_error = max(suspect.local_error or 0.0, local)
        return suspect

    def _error(self, tensor: torch.Tensor) -> float:
        """The relative distance of a tensor from what fp32 would have in its place."""
        twin = self._twin.value_of(tensor) if tensor.layout == torch.strided else None
        if twin is None or not tensor.is_floating_point() or tensor.numel() == 0:
            return 0.0
        wide, other = tensor.detach().double(), twin.double()
        both = wide.isfinite() & other.isfinite()
        if (wide.isfinite() != other.isfinite()).any():
            return BROKEN
        length = other[both].norm().item()
        distance = (wide - other)[both].norm().item()
        return min(distance / length, BROKEN) if length else float(distance > 0)


def _is_harmless(call: OpCall, local: float | None) -> bool:
    """Whether it cannot be at fault: exact, and its arguments were not cast down for it.

    Random ops draw the same numbers in 16 bits as far as those have room for them.
    """
    if call.is_view or call.is_cast or torch.Tag.nondeterministic_seeded in call.func.tags:
        return True
    if call.op.startswith(("empty", "new_empty")):
        return True  # What it holds is no result.
    is_lowered = call.autocast is not None and call.autocast[2] in LOWERING
    return local == 0.0 and not is_lowered


def _worst_element(output: torch.Tensor, reference: Any) -> float | None:
    other = next((t for t in tree_leaves(reference) if isinstance(t, torch.Tensor)), None)
    if other is None or other.shape != output.shape:
        return None
    if not output.is_floating_point() or output.numel() == 0:
        return 0.0
    wide, twin = output.detach().double(), other.double()
    if (wide.isfinite() != twin.isfinite()).any():
        return BROKEN
    if not twin.isfinite().all():
        return None  # Broken before: what the op does to numbers is not seen.
    larger = torch.maximum(wide.abs(), twin.abs())
    relative = (wide - twin).abs() / larger
    return float(relative.nan_to_num(0.0).max().item())


def _memory(tensor: torch.Tensor) -> int:
    cdata: int = tensor.untyped_storage()._cdata
    return cdata
