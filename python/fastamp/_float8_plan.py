# SPDX-License-Identifier: Apache-2.0
"""What a recipe would do with the linear layers of a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import fastamp._C as _C
from fastamp._aligned_text import aligned
from fastamp._fake_models import FakeTensors, fake_copy, raw_region, unchanged_state
from fastamp._float8 import Float8Recipe, fields_of

__all__ = ["Float8Plan", "Float8PlanRow", "float8_plan"]

_DEFAULT_GPU = "H200 SXM"


@dataclasses.dataclass(frozen=True)
class Float8PlanRow:
    """The calls of a model that are the same product: one op with one weight at the same sizes.

    Attributes:
        module: Name of the module that owns the weight, with the parameter's if that is not
            ``weight``; several, joined by ``" = "``, if they share it. Empty if the second operand
            is no parameter of the model.
        op: ``"linear"``, ``"addmm"``, ``"mm"`` or ``"matmul"``.
        m: Rows of x, such as tokens. As ``k`` and ``n`` 0 for what is not x times a weight.
        k: Columns of x.
        n: Columns of the result.
        x_dtype: Dtype in which x is given; empty for what is not x times a weight.
        float8: ``"float8"`` if the product runs in fp8, else why not, as in :func:`fastamp.trace`.
        calls: How often the model makes the call.
        carrier_seconds: Predicted time of forward and backward on the GPU without the recipe, of
            all calls, casts included; 0 without a prediction.
        float8_seconds: The same in fp8, whether or not the product runs in it.
        gain: What ``min_gain`` is compared with; None without a prediction.
        carrier_saved_bytes: What a region without a recipe keeps of x and the weight for backward.
        saved_bytes: What is kept in the way that ``float8`` says.
    """

    module: str
    op: str
    m: int
    k: int
    n: int
    x_dtype: str
    float8: str
    calls: int
    carrier_seconds: float
    float8_seconds: float
    gain: float | None
    carrier_saved_bytes: int
    saved_bytes: int

    @property
    def seconds(self) -> float:
        """Predicted time in the way that ``float8`` says; 0 without a prediction."""
        return self.float8_seconds if self.float8 == "float8" else self.carrier_seconds


@dataclasses.dataclass(frozen=True)
class Float8Plan:
    """The products of a model's linear layers; its ``str`` is a table of them.

    Attributes:
        rows: In the order of their first calls.
        gpu: What the times are predicted for; empty without predictions.
        gpu_is_present: Whether that is the GPU of this machine.
    """

    rows: tuple[Float8PlanRow, ...]
    gpu: str
    gpu_is_present: bool

    @property
    def gain(self) -> float | None:
        """Predicted speed-up of all products together; None without a prediction."""
        seconds = sum(row.seconds for row in self.rows)
        return sum(row.carrier_seconds for row in self.rows) / seconds if seconds else None

    @property
    def carrier_saved_bytes(self) -> int:
        """What a region without a recipe keeps for backward of the operands of all products."""
        return sum(row.carrier_saved_bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """What a region with the recipe keeps of them."""
        return sum(row.saved_bytes for row in self.rows)

    def __str__(self) -> str:
        """Returns the table, with sums below it."""
        return _text_of(self)


def float8_plan(
    model: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    recipe: Float8Recipe | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Float8Plan:
    """Tells which products of a model a region runs in fp8, and why not the others.

    Runs the forward pass of a copy of the model without values: it takes no GPU, no memory and no
    product. Neither the model, its inputs nor the generators of random numbers change. What the
    trace says when the model runs on that GPU is the same, as it comes from the same code::

        print(fastamp.float8_plan(model, x, gpu="H200 SXM"))

    Backward passes are predicted: of weights that are parameters and require gradients, with all
    three products. Times are those of a model of the GPU, nothing is measured; see docs/float8.md.

    Args:
        model: A model that ``copy.deepcopy`` can copy, that is not scripted, and whose control flow
            does not depend on values of tensors.
        *inputs: The arguments of its forward pass, in any nesting. Of tensors only shape, dtype and
            ``requires_grad`` count; they may be on any device, ``meta`` included.
        kwargs: Its arguments by name.
        device: Where the model is to run: ``"cuda"``, or ``"cpu"``, where the rule is not asked,
            so that every product that can run in fp8 does.
        gpu: One of ``"H100 SXM"``, ``"H200 SXM"`` and ``"H200 NVL"``; by default the current GPU,
            or an H200 SXM where there is none with fp8.
        recipe: That of the region; by default ``Float8Recipe()``.
        dtype: That of the region: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        TypeError: An argument has another type, or a parameter of the model is no plain tensor.
        ValueError: ``device``, ``gpu`` or ``dtype`` is none of those, or ``gpu`` is given for the
            CPU.
        RuntimeError: The model cannot run without values, or fastamp's kernels are not registered.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    _check_arguments(model, kwargs, device, gpu, recipe, dtype)
    present = _C.present_float8_gpu()
    # A pretended GPU is asked on any device.
    wanted = gpu or ("" if present or device == "cpu" else _DEFAULT_GPU)
    calls = _C.call_plan(wanted, fields_of(recipe or Float8Recipe()), dtype)
    model = getattr(model, "_orig_mod", model)  # What torch.compile was given.
    with unset_fake_temporarily(), unchanged_state():  # A model may be fake, as on meta.
        rows = _record(calls, model, inputs, dict(kwargs or {}), device, dtype)
    predicted = any(row.gain is not None for row in rows)
    return Float8Plan(
        rows=tuple(rows),
        gpu=(wanted or present) if predicted or device == "cuda" else "",
        gpu_is_present=not wanted or wanted == present,
    )


def _check_arguments(
    model: Any, kwargs: Any, device: Any, gpu: Any, recipe: Any, dtype: Any
) -> None:
    for name, value, kind, wanted in (
        ("model", model, torch.nn.Module, "a torch.nn.Module"),
        ("kwargs", kwargs, (Mapping, type(None)), "a mapping or None"),
        ("device", device, str, "a str"),
        ("gpu", gpu, (str, type(None)), "a str or None"),
        ("recipe", recipe, (Float8Recipe, type(None)), "a Float8Recipe or None"),
        ("dtype", dtype, torch.dtype, "a torch.dtype"),
    ):
        if not isinstance(value, kind):
            got = type(value).__name__
            raise TypeError(f"float8_plan: expected {name} to be {wanted}, got {got}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"float8_plan: expected device to be 'cpu' or 'cuda', got {device!r}")
    if device == "cpu" and gpu is not None:
        raise ValueError(
            f"float8_plan: expected gpu to be None with device 'cpu', where the rule is not asked, "
            f"got {gpu!r}"
        )
    if gpu is not None and gpu not in _C.float8_gpus():
        names = ", ".join(_C.float8_gpus())
        raise ValueError(f"float8_plan: expected gpu to be one of {names}, got {gpu!r}")
    if not _C.kernels_registered():
        raise RuntimeError(
            "float8_plan: expected fastamp's kernels to be registered, got FASTAMP_NO_REGISTER"
        )


@contextlib.contextmanager
def _region(device: str, dtype: torch.dtype, number: int) -> Iterator[None]:
    numbers = _C.float8_numbers()
    with raw_region(device, dtype):
        _C.set_float8_numbers((number, number))
        try:
            yield
        finally:
            _C.set_float8_numbers(numbers)


def _record(
    calls: Any,
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    dtype: torch.dtype,
) -> list[Float8PlanRow]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = FakeTensors("float8_plan", fake_mode, device)
    copied, names = fake_copy(model, fakes)
    args, by_name = tree_map_only(torch.Tensor, fakes.of_input, (inputs, kwargs))
    kept = list(copied.parameters())  # Their ids stay theirs.
    excluded: list[torch.Tensor] = [
        copy_of_it
        for tensor, copy_of_it in zip(model.parameters(), kept, strict=True)
        if _C.is_excluded_from_float8(tensor)
    ]
    exclusion = _C.exclude_from_float8(excluded)
    try:
        with fake_mode, _region(device, dtype, calls.number):
            calls.start()
            try:
                copied(*args, **by_name)
            finally:
                calls.stop()
    except Exception as error:
        kind = type(error).__name__
        raise RuntimeError(
            f"float8_plan: expected a model that runs with these inputs, and on tensors without "
            f"values, got {kind}: {error}"
        ) from error
    finally:
        _C.end_float8_exclusion(exclusion)
    return _rows(calls.rows(), names)


def _rows(calls: list[dict[str, Any]], names: dict[int, str]) -> list[Float8PlanRow]:
    """One row for all calls that differ in nothing but when they are made.

    A part of a parameter, such as a third of ``in_proj_weight``, has the parameter's name.
    """
    rows: dict[tuple[Any, ...], Float8PlanRow] = {}
    for call in calls:
        weight = call.pop("weight")
        base = weight if weight is None or weight._base is None else weight._base
        row = Float8PlanRow(**call, module=names.get(id(base), ""), calls=1)
        row = dataclasses.replace(
            row, gain=row.gain or None, x_dtype=row.x_dtype if row.k or row.m else ""
        )
        key = (row.module, row.op, row.m, row.k, row.n, row.x_dtype, row.float8)
        rows[key] = _together(rows[key], row) if key in rows else row
    return list(rows.values())


def _together(a: Float8PlanRow, b: Float8PlanRow) -> Float8PlanRow:
    return dataclasses.replace(
        a,
        calls=a.calls + b.calls,
        carrier_seconds=a.carrier_seconds + b.carrier_seconds,
        float8_seconds=a.float8_seconds + b.float8_seconds,
        carrier_saved_bytes=a.carrier_saved_bytes + b.carrier_saved_bytes,
        saved_bytes=a.saved_bytes + b.saved_bytes,
    )


_HEADING = ("Module", "Op", "M", "K", "N", "x", "In fp8", "Calls", "16-bit us", "fp8 us", "Gain")
_SAVED = ("Saved MiB, 16-bit", "planned")
_TEXT_COLUMNS = (0, 1, 5, 6)


def _cells(row: Float8PlanRow) -> list[str]:
    sizes = [str(size) for size in (row.m, row.k, row.n)] if row.x_dtype else ["-"] * 3
    predicted = ["-"] * 3
    if row.gain is not None:
        times = (row.carrier_seconds, row.float8_seconds)
        predicted = [*(f"{1e6 * seconds:.0f}" for seconds in times), f"{row.gain:.2f}"]
    saved = [f"{size / 2**20:.2f}" for size in (row.carrier_saved_bytes, row.saved_bytes)]
    outcome = "yes" if row.float8 == "float8" else f"no: {row.float8}"
    names = [row.module or "-", row.op]
    return [*names, *sizes, row.x_dtype or "-", outcome, str(row.calls), *predicted, *saved]


def _text_of(plan: Float8Plan) -> str:
    table = [[*_HEADING, *_SAVED], *(_cells(row) for row in plan.rows)]
    heading, rule, *lines = aligned(table, _TEXT_COLUMNS)
    title = "The CPU runs in fp8 what can: nothing is predicted"
    if plan.gpu:
        where = "the GPU here" if plan.gpu_is_present else "there is no GPU with fp8 here"
        if not plan.gpu_is_present and _C.present_float8_gpu():
            where = "another GPU than the one here"
        title = f"Predicted, not measured, for {plan.gpu} ({where})"
    in_float8 = sum(row.calls for row in plan.rows if row.float8 == "float8")
    sums = f"{in_float8} of {sum(row.calls for row in plan.rows)} products in fp8"
    if plan.gain is not None:
        sums += f"; all together {plan.gain:.2f} times as fast as in 16 bits"
    saved = (plan.carrier_saved_bytes, plan.saved_bytes)
    sums += "; saved for backward {:.2f} MiB instead of {:.2f}".format(
        *(size / 2**20 for size in reversed(saved))
    )
    return "\n".join([title, heading, rule, *lines, rule, sums])
