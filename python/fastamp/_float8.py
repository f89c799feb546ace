# SPDX-License-Identifier: Apache-2.0
"""Regions that run linear layers in fp8."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import fastamp._C as _C
from fastamp import _compile
from fastamp._kept_casts import WeightRequest, weights_of

__all__ = ["Float8Recipe", "float8_exclude", "float8_recipe"]


@dataclasses.dataclass(frozen=True)
class Float8Recipe:
    """How an autocast region runs the products of linear layers in fp8; see docs/float8.md.

    Attributes:
        forward_dtype: Format of activations and weights.
        grad_dtype: Format of the gradients of outputs: ``torch.float8_e5m2`` has their range,
            ``torch.float8_e4m3fn`` one more bit.
        fast_accumulate: For which of the three products of a linear layer, y, dX and dW, the tensor
            cores of a Hopper GPU sum with fewer bits. No effect elsewhere.
        ops: The ops that may run in fp8, of ``"linear"``, ``"addmm"``, ``"mm"`` and ``"matmul"``.
        min_gain: On a GPU, the predicted speed-up over the carrier below which a product stays
            there; 0 for all that can run in fp8. Without meaning on the CPU.
        scale: ``"current"``: each tensor is read for its range, then cast. ``"predicted"``: x and
            dY are read once, cast with the scale that the range they had when they last met the
            same parameter predicts, and again where that does not fit. Elements that underflow then
            depend on what came before; all others are the same.

    Raises:
        TypeError: An argument has another type.
        ValueError: A format is no fp8 format that products take, both are ``float8_e5m2``, an op
            is none of the four, ``min_gain`` is negative or nan, or ``scale`` is none of the two.
    """

    forward_dtype: torch.dtype = torch.float8_e4m3fn
    grad_dtype: torch.dtype = torch.float8_e5m2
    fast_accumulate: tuple[bool, bool, bool] = (True, False, False)
    ops: tuple[str, ...] = ("linear", "addmm", "mm", "matmul")
    min_gain: float = 1.1
    scale: str = "current"

    def __post_init__(self) -> None:
        """Checks the values, before any region is made."""
        for name in ("forward_dtype", "grad_dtype"):
            _check_type(name, "a torch.dtype", isinstance(getattr(self, name), torch.dtype), self)
        fast = self.fast_accumulate
        is_triple = isinstance(fast, tuple) and [type(item) for item in fast] == [bool] * 3
        _check_type("fast_accumulate", "a tuple of three bools", is_triple, self)
        are_names = isinstance(self.ops, tuple) and all(isinstance(op, str) for op in self.ops)
        _check_type("ops", "a tuple of str", are_names, self)
        is_number = isinstance(self.min_gain, (int, float)) and not isinstance(self.min_gain, bool)
        _check_type("min_gain", "a float", is_number, self)
        _check_type("scale", "a str", isinstance(self.scale, str), self)
        _C.check_float8_recipe(fields_of(self))


def _check_type(name: str, wanted: str, is_right: bool, recipe: Float8Recipe) -> None:
    if not is_right:
        got = getattr(recipe, name)
        raise TypeError(
            f"Float8Recipe: expected {name} to be {wanted}, got {type(got).__name__} {got!r}"
        )


_Fields = tuple[torch.dtype, torch.dtype, tuple[bool, bool, bool], tuple[str, ...], float, str]


def fields_of(recipe: Float8Recipe) -> _Fields:
    """What native code makes its recipe of."""
    formats = (recipe.forward_dtype, recipe.grad_dtype)
    return (*formats, recipe.fast_accumulate, recipe.ops, recipe.min_gain, recipe.scale)


def _from_native(fields: Any) -> Float8Recipe:
    forward_dtype, grad_dtype, fast_accumulate, ops, *others = fields
    return Float8Recipe(forward_dtype, grad_dtype, tuple(fast_accumulate), tuple(ops), *others)


def recipe_numbered(number: int) -> Float8Recipe:
    """The recipe with the number that native code knows it by."""
    return _from_native(_C.float8_recipe_numbered(number))


def float8_recipe(device_type: str) -> Float8Recipe | None:
    """Returns the recipe that ops on a device follow now, on this thread.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        ``None`` outside fp8 regions, and where one is suspended: by a region of another dtype
        inside it, or by one that is off.
    """
    fields = _C.float8_recipe(device_type)
    return None if fields is None else _from_native(fields)


@contextlib.contextmanager
def default_recipe(device_type: str, recipe: Float8Recipe) -> Iterator[None]:
    """Inside, all bfloat16 regions of the process that name no recipe follow this one."""
    _C.set_default_float8(device_type, fields_of(recipe))
    try:
        yield
    finally:
        _C.set_default_float8(device_type, None)


def region_arguments(
    device_type: Any,
    dtype: Any = None,
    enabled: Any = True,
    cache_enabled: Any = None,
    *,
    float8: Any = None,
) -> tuple[tuple[Any, ...], int]:
    """Takes an fp8 recipe out of the arguments of a region.

    Returns:
        The arguments of a region of the carrier, and the number of the recipe, 0 for none.

    Raises:
        TypeError: ``float8`` or ``dtype`` has another type.
        ValueError: The arguments contradict one another, or the recipe is impossible.
    """
    if not (float8 is None or isinstance(float8, (bool, Float8Recipe))):
        raise TypeError(
            f"autocast: expected float8 to be a bool or a Float8Recipe, got {type(float8).__name__}"
        )
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError(f"autocast: expected dtype to be a torch.dtype, got {type(dtype).__name__}")
    wants_float8 = isinstance(float8, Float8Recipe) or bool(float8)
    if dtype is not None and dtype.itemsize == 1 and dtype.is_floating_point:
        if isinstance(device_type, str) and torch.device(device_type).type != "cuda":
            if wants_float8:
                raise ValueError(
                    f"autocast: expected dtype to be torch.bfloat16 or torch.float16 where float8 "
                    f"is given on {device_type}, got {dtype}"
                )
            # As in torch, which warns and disables the region.
            return (device_type, dtype, enabled, cache_enabled), 0
        _C.check_float8_dtype(dtype)
        if float8 is False:
            raise ValueError(f"autocast: expected float8 not to be False with dtype {dtype}")
        dtype, wants_float8 = None, True
    if not wants_float8 or not isinstance(device_type, str):
        return (device_type, dtype, enabled, cache_enabled), 0
    carrier = torch.bfloat16 if dtype is None else dtype
    recipe = float8 if isinstance(float8, Float8Recipe) else Float8Recipe()
    number = _C.float8_number(device_type, fields_of(recipe), carrier)
    return (device_type, carrier, enabled, cache_enabled), number


class float8_exclude(WeightRequest):  # noqa: N801 (reads as what it does)
    """Keeps the products of some weights out of fp8, in all regions of the process.

    For the head of a model, which loses the most by fp8::

        fastamp.float8_exclude(model.lm_head)

    Works until :meth:`release`, as a ``with`` block, or as long as the weights live: they are held
    weakly. The weights are those that the module has now.

    Args:
        weights: A module (its parameters), a tensor or an iterable of tensors.

    Raises:
        TypeError: ``weights`` is something else.
    """

    def __init__(self, weights: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Excludes them, at once."""
        tensors = weights_of("float8_exclude", weights)
        super().__init__(_C.exclude_from_float8(tensors), _end_exclusion)
        _compile.forget_graphs()


def _end_exclusion(number: int) -> None:
    _C.end_float8_exclusion(number)
    _compile.forget_graphs()
