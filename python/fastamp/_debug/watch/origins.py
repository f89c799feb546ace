# SPDX-License-Identifier: Apache-2.0
"""Finds where inf and NaN come from: the first op that makes them, or a tensor that had them."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import address, is_half, is_readable, local_of
from fastamp._debug.watch.op_calls import OpCall
from fastamp._debug.watch.twin import Fp32Twin

__all__ = ["Origin", "Origins", "has_nonfinite", "short_path", "source_of"]

_PACKAGES = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).resolve().parents[2])
)
# Each is computed in fp32 beside; a step that is broken as a whole has more.
_MOST_COMPARED = 64


@dataclasses.dataclass(frozen=True)
class Origin:
    """Place where numbers began not to be finite.

    Attributes:
        number: The order in which origins were seen, from 0.
        op: The op that made them, or was given them.
        module: The innermost module around it; empty outside.
        source: ``"file:line"`` of the innermost line that is neither torch's nor fastamp's; in a
            backward pass that which began it. Empty if there is none.
        backward: Whether a backward pass ran it.
        made: ``"inf"``, ``"NaN"`` or ``"inf and NaN"``.
        dtype: Of the tensor that has them.
        is_low: Whether an argument or the result has 16 bits.
        is_positive: Whether +inf is among them, which no mask is.
        given: What the tensor is that had them when it came into the step; empty if the op has made
            them of finite numbers.
        is_masked: Whether the op was given -inf, by a mask.
        is_written: Whether the program has written inf or NaN itself, as a number.
        in_fp32: The largest magnitude that fp32 makes of the same arguments; inf if that is not
            finite either, None if that is not known.
    """

    number: int
    op: str
    module: str
    source: str
    backward: bool
    made: str
    dtype: str
    is_low: bool
    is_positive: bool
    given: str = ""
    is_masked: bool = False
    is_written: bool = False
    in_fp32: float | None = None


#: What a program sets to -inf on purpose.
_MASK = Origin(-1, "", "", "", False, "inf", "", False, False)


class Origins:
    """Follows numbers that are not finite from op to op, by the memory that they are in.

    Args:
        names: Of modules, parameters and buffers.

    Attributes:
        count: How many were seen: the number of the next.
    """

    def __init__(self, names: ModelNames) -> None:
        """Knows of none."""
        self._names = names
        self._by_memory: dict[int, Origin] = {}
        self._found: list[Origin] = []
        self.count = 0

    def overflow(self) -> Origin | None:
        """The first op of a forward pass that overflowed in 16 bits, whatever became of that."""
        overflows = (
            each
            for each in self._found
            if each.is_low
            and each.is_positive
            and not (each.backward or each.given)
            and math.isfinite(math.inf if each.in_fp32 is None else each.in_fp32)
        )
        return next(overflows, None)

    def of(self, tensor: Any) -> Origin | None:
        """Returns where inf and NaN in a tensor come from; None if it is finite, or masked."""
        if not has_nonfinite(tensor):
            return None
        origin = self._by_memory.get(address(local_of(tensor)))
        return None if origin is _MASK else origin

    def forget_found(self) -> None:
        """A step has ended: what is found from now on is another's."""
        self._found.clear()

    def see(self, call: OpCall, result: Any) -> None:
        """Looks at an op that has run."""
        if call.is_view or call.func.namespace == "prim":
            return
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)] or call.written
        made = [t for t in made if local_of(t) is t]  # a subclass's own ops are seen, too
        broken = [] if "empty" in call.op else [t for t in made if has_nonfinite(t)]
        origin = self._origin(call, broken) if broken else None
        for tensor in made:
            memory = address(tensor)
            if origin is not None and any(tensor is each for each in broken):
                self._by_memory[memory] = origin
            elif self._by_memory and not _is_part(tensor):
                self._by_memory.pop(memory, None)

    def _origin(self, call: OpCall, broken: list[torch.Tensor]) -> Origin:
        inherited = self._inherited(call, broken)
        has_nan = any(bool(torch.isnan(tensor).any()) for tensor in broken)
        if inherited is not None and (inherited is not _MASK or not has_nan):
            return inherited
        if inherited is None and _is_mask(call, broken):
            return _MASK
        if inherited is None and any(not math.isfinite(number) for number in _numbers(call)):
            return self._new(call, broken[0], is_low=False, is_written=True)
        is_low = any(is_half(t) for t in (*call.tensors, *broken))
        return self._new(
            call,
            broken[0],
            is_masked=inherited is _MASK,
            is_low=is_low,
            in_fp32=self._in_fp32(call) if is_low else math.inf,
        )

    def _inherited(self, call: OpCall, broken: list[torch.Tensor]) -> Origin | None:
        """The origin of an argument: of NaN and inf before that of -inf, which may be a mask."""
        found: list[Origin] = []
        for tensor in _read(call):
            known = self._by_memory.get(address(tensor))
            if any(tensor is each for each in broken):  # written: what it was is gone
                found += [known] if known is not None else []
            elif has_nonfinite(tensor):
                found.append(known or self._given(call, tensor))
        return min(found, key=lambda each: (each is _MASK, each.number), default=None)

    def _given(self, call: OpCall, tensor: torch.Tensor) -> Origin:
        memory = address(tensor)
        name = next((name for name, held in self._names.held() if address(held) == memory), "")
        if not name and bool(torch.isneginf(tensor)[~torch.isfinite(tensor)].all()):
            self._by_memory[memory] = _MASK
            return _MASK
        shape = list(tensor.shape)
        kind = str(tensor.dtype).removeprefix("torch.")
        given = name or f"your data, a {kind} tensor {shape} that no op of this step made"
        # torch gives numbers as tensors without dimensions, too.
        is_written = not name and tensor.dim() == 0
        given = "" if is_written else given
        origin = self._new(call, tensor, given=given, is_low=is_half(tensor), is_written=is_written)
        self._by_memory[memory] = origin
        return origin

    def _new(self, call: OpCall, tensor: torch.Tensor, **more: Any) -> Origin:
        kinds = (("inf", torch.isinf), ("NaN", torch.isnan))
        made = [name for name, has in kinds if bool(has(tensor).any())]
        op = f"{call.op} of {call.autocast[0]}" if call.autocast and call.is_cast else call.op
        origin = Origin(
            number=self.count,
            op=op,
            module=call.module,
            source=source_of(sys._getframe()),
            backward=call.backward,
            made=" and ".join(made),
            dtype=str(tensor.dtype).removeprefix("torch."),
            is_positive=bool(torch.isposinf(tensor).any()) if tensor.is_floating_point() else False,
            **more,
        )
        self.count += 1
        self._found.append(origin)
        return origin

    def _in_fp32(self, call: OpCall) -> float | None:
        if call.written or len(self._found) >= _MOST_COMPARED:
            return None
        _, beside = Fp32Twin().before(call)
        wide = [t for t in tree_leaves(beside) if isinstance(t, torch.Tensor)]
        wide = [t for t in wide if t.is_floating_point() and t.numel()]
        return max((t.abs().max().nan_to_num(math.inf).item() for t in wide), default=None)


def has_nonfinite(tensor: Any) -> bool:
    """Whether a tensor has inf or NaN, on this rank; False of what cannot be read."""
    local = local_of(tensor)
    return (
        local is not None
        and (local.is_floating_point() or local.is_complex())
        and is_readable(local)
        and local.element_size() > 1
        and not bool(torch.isfinite(local.detach()).all())
    )


def _read(call: OpCall) -> list[torch.Tensor]:
    """The tensors that decide the result: no running statistics of a norm that trains."""
    tensors = [t for t in call.tensors if local_of(t) is t]
    if "batch_norm" not in call.op:
        return tensors
    trains = next((each for each in call.args[5:8] if isinstance(each, bool)), True)
    statistics = call.args[3:5] if trains else ()
    return [t for t in tensors if all(t is not each for each in statistics)]


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def _numbers(call: OpCall) -> list[float]:
    return [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, float)]


def _is_mask(call: OpCall, broken: list[torch.Tensor]) -> bool:
    """Whether an argument is -inf itself, or a number that becomes -inf in 16 bits."""
    lowest = min(torch.finfo(tensor.dtype).min for tensor in broken)
    return any(number < lowest for number in _numbers(call))


def source_of(frame: FrameType | None) -> str:
    """``"file:line"`` of the innermost frame that is neither torch's nor fastamp's; else empty."""
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<frozen")):
        frame = frame.f_back
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def short_path(file: str) -> str:
    """A file as seen from the current folder, or from the folder of packages that it is in."""
    folders = [folder for folder in (str(Path.cwd()), *sys.path) if file.startswith(f"{folder}/")]
    return file[len(max(folders, key=len, default="")) :].removeprefix("/") if folders else file
