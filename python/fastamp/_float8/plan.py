# SPDX-License-Identifier: Apache-2.0
"""Plans: what a recipe would do with the linear layers of a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

import fastamp._C as _C
from fastamp._dynamo.fake_models import FakeTensors, fake_copy, raw_region, unchanged_state
from fastamp._float8.recipe import Float8Recipe, fields_of
from fastamp._util.aligned_text import aligned

__all__ = ["Float8Plan", "Float8PlanRow", "float8_plan"]


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
        float8: ``"float8"`` if the product runs in fp8, else why not, as in
            :func:`fastamp.debug.trace`.
        calls: How often the model makes the call.
        base_dtype_saved_bytes: What a region without a recipe keeps of x and the weight for
            backward.
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
    base_dtype_saved_bytes: int
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class Float8Plan:
    """The products of a model's linear layers; its ``str`` is a table of them.

    Attributes:
        rows: In the order of their first calls.
        device: Where the model is to run.
    """

    rows: tuple[Float8PlanRow, ...]
    device: str

    @property
    def base_dtype_saved_bytes(self) -> int:
        """Bytes that a region without a recipe keeps for backward of all products' operands."""
        return sum(row.base_dtype_saved_bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes that a region with the recipe keeps of them."""
        return sum(row.saved_bytes for row in self.rows)

    def __str__(self) -> str:
        """Returns the table, with sums below it."""
        return _text_of(self)


def float8_plan(
    model: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: str = "cuda",
    recipe: Float8Recipe | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Float8Plan:
    """Lists the products of a model that a region runs in fp8, and why not the others.

    Runs the forward pass of a copy of the model without values: it takes no GPU, no memory and no
    product. Neither the model, its inputs nor the generators of random numbers change. What the
    trace says when the model runs there is the same, as it comes from the same code::

        print(fastamp.float8.plan(model, x))

    Args:
        model: A model that ``copy.deepcopy`` can copy, that is not scripted, and whose control flow
            does not depend on values of tensors.
        *inputs: The arguments of its forward pass, in any nesting. Of tensors only shape, dtype and
            ``requires_grad`` count; they may be on any device, ``meta`` included.
        kwargs: Its arguments by name.
        device: Where the model is to run: ``"cuda"`` or ``"cpu"``, which differ in the
            ``small_size`` of a recipe that has none.
        recipe: That of the region; by default ``float8.Recipe()``.
        dtype: That of the region: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        TypeError: An argument has another type, or a parameter of the model is no plain tensor.
        ValueError: ``device`` or ``dtype`` is none of those.
        RuntimeError: The model cannot run without values, or fastamp's kernels are not registered.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    _check_arguments(model, kwargs, device, recipe, dtype)
    number = _C.float8_number_of_plan(fields_of(recipe or Float8Recipe()), dtype)
    model = getattr(model, "_orig_mod", model)  # What torch.compile was given.
    with unset_fake_temporarily(), unchanged_state():  # A model may be fake, as on meta.
        rows = _record(_region(device, dtype, number), model, inputs, dict(kwargs or {}), device)
    return Float8Plan(tuple(rows), device)


def _check_arguments(model: Any, kwargs: Any, device: Any, recipe: Any, dtype: Any) -> None:
    for name, value, kind, wanted in (
        ("model", model, torch.nn.Module, "a torch.nn.Module"),
        ("kwargs", kwargs, (Mapping, type(None)), "a mapping or None"),
        ("device", device, str, "a str"),
        ("recipe", recipe, (Float8Recipe, type(None)), "a float8.Recipe or None"),
        ("dtype", dtype, torch.dtype, "a torch.dtype"),
    ):
        if not isinstance(value, kind):
            got = type(value).__name__
            raise TypeError(f"float8.plan: expected {name} to be {wanted}, got {got}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"float8.plan: expected device to be 'cpu' or 'cuda', got {device!r}")
    if not _C.kernels_registered():
        raise RuntimeError(
            "float8.plan: expected fastamp's kernels to be registered, got FASTAMP_NO_REGISTER"
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
    region: AbstractContextManager[None],
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
) -> list[Float8PlanRow]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = FakeTensors("float8.plan", fake_mode, device)
    copied, names = fake_copy(model, fakes)
    args, by_name = tree_map_only(torch.Tensor, fakes.of_input, (inputs, kwargs))
    kept = list(copied.parameters())  # Their ids stay theirs.
    excluded: list[torch.Tensor] = [
        copy_of_it
        for tensor, copy_of_it in zip(model.parameters(), kept, strict=True)
        if _C.is_excluded_from_float8(tensor)
    ]
    exclusion = _C.exclude_from_float8(excluded)
    calls = _C.Float8Calls()
    try:
        with fake_mode, region:
            calls.start()
            try:
                copied(*args, **by_name)
            finally:
                calls.stop()
    except Exception as error:
        kind = type(error).__name__
        raise RuntimeError(
            f"float8.plan: expected a model that runs with these inputs, and on tensors without "
            f"values, got {kind}: {error}"
        ) from error
    finally:
        _C.end_float8_exclusion(exclusion)
    return _rows(calls.rows(), names)


def _rows(calls: list[dict[str, Any]], names: dict[int, str]) -> list[Float8PlanRow]:
    """Makes one row for all calls that differ in nothing but when they are made.

    A part of a parameter, such as a third of ``in_proj_weight``, has the parameter's name.
    """
    rows: dict[tuple[Any, ...], Float8PlanRow] = {}
    for call in calls:
        weight = call.pop("weight")
        base = weight if weight is None or weight._base is None else weight._base
        if not (call["k"] or call["m"]):
            call["x_dtype"] = ""
        row = Float8PlanRow(**call, module=names.get(id(base), ""), calls=1)
        key = (row.module, row.op, row.m, row.k, row.n, row.x_dtype, row.float8)
        rows[key] = _together(rows[key], row) if key in rows else row
    return list(rows.values())


def _together(a: Float8PlanRow, b: Float8PlanRow) -> Float8PlanRow:
    return dataclasses.replace(
        a,
        calls=a.calls + b.calls,
        base_dtype_saved_bytes=a.base_dtype_saved_bytes + b.base_dtype_saved_bytes,
        saved_bytes=a.saved_bytes + b.saved_bytes,
    )


_HEADING = ("Module", "Op", "M", "K", "N", "x", "In fp8", "Calls", "Saved MiB, 16-bit", "planned")
_TEXT_COLUMNS = (0, 1, 5, 6)


def _cells(row: Float8PlanRow) -> list[str]:
    sizes = [str(size) for size in (row.m, row.k, row.n)] if row.x_dtype else ["-"] * 3
    saved = [f"{size / 2**20:.2f}" for size in (row.base_dtype_saved_bytes, row.saved_bytes)]
    outcome = "yes" if row.float8 == "float8" else f"no: {row.float8}"
    names = [row.module or "-", row.op]
    return [*names, *sizes, row.x_dtype or "-", outcome, str(row.calls), *saved]


def _text_of(plan: Float8Plan) -> str:
    table = [_HEADING, *(_cells(row) for row in plan.rows)]
    heading, rule, *lines = aligned(table, _TEXT_COLUMNS)
    in_float8 = sum(row.calls for row in plan.rows if row.float8 == "float8")
    sums = f"{in_float8} of {sum(row.calls for row in plan.rows)} products in fp8 on {plan.device}"
    saved, of_16_bits = (size / 2**20 for size in (plan.saved_bytes, plan.base_dtype_saved_bytes))
    sums += f"; saved for backward {saved:.2f} MiB instead of {of_16_bits:.2f}"
    return "\n".join([heading, rule, *lines, rule, sums])
