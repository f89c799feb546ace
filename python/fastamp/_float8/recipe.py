# SPDX-License-Identifier: Apache-2.0
"""Regions that run linear layers in fp8."""

# No `from __future__ import annotations`: hints of a class that is published elsewhere are objects.

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

import fastamp._C as _C
from fastamp._casts.kept_casts import WeightRequest, weights_of
from fastamp._dynamo import compiler

__all__ = ["Float8Recipe", "float8_exclude", "float8_recipe"]


@dataclasses.dataclass(frozen=True)
class Float8Recipe:
    """Recipe by which an autocast region runs products of linear layers in fp8: docs/float8.md.

    Attributes:
        forward_dtype: Format of activations and weights.
        grad_dtype: Format of the gradients of outputs: ``torch.float8_e5m2`` has their range,
            ``torch.float8_e4m3fn`` one more bit.
        fast_accumulate: For which of the three products of a linear layer, y, dX and dW, the tensor
            cores of a Hopper GPU sum with fewer bits. No effect elsewhere.
        ops: The ops that may run in fp8, of ``"linear"``, ``"addmm"``, ``"mm"`` and ``"matmul"``.
        small_size: Where K and N, the sizes of a weight, are at most these, the product stays in
            the base dtype, since casts cost more than fp8 saves; ``(0, 0)`` for all that can run in
            fp8. By default ``(4096, 1024)`` on a GPU, as torchao has it; on the CPU, where fp8 is a
            reference, no product is small.

    Raises:
        TypeError: An argument has another type.
        ValueError: A format is no fp8 format that products take, both are ``float8_e5m2``, an op
            is none of the four, or a ``small_size`` is negative.
    """

    forward_dtype: torch.dtype = torch.float8_e4m3fn
    grad_dtype: torch.dtype = torch.float8_e5m2
    fast_accumulate: tuple[bool, bool, bool] = (True, False, False)
    ops: tuple[str, ...] = ("linear", "addmm", "mm", "matmul")
    small_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Checks the values, before any region is made."""
        for name in ("forward_dtype", "grad_dtype"):
            _check_type(name, "a torch.dtype", isinstance(getattr(self, name), torch.dtype), self)
        fast = self.fast_accumulate
        is_triple = isinstance(fast, tuple) and [type(item) for item in fast] == [bool] * 3
        _check_type("fast_accumulate", "a tuple of three bools", is_triple, self)
        are_names = isinstance(self.ops, tuple) and all(isinstance(op, str) for op in self.ops)
        _check_type("ops", "a tuple of str", are_names, self)
        size = self.small_size
        is_pair = isinstance(size, tuple) and [type(item) for item in size] == [int] * 2
        _check_type("small_size", "a tuple of two ints or None", size is None or is_pair, self)
        _C.check_float8_recipe(fields_of(self))


def _check_type(name: str, wanted: str, is_right: bool, recipe: Float8Recipe) -> None:
    if not is_right:
        got = getattr(recipe, name)
        raise TypeError(
            f"float8.Recipe: expected {name} to be {wanted}, got {type(got).__name__} {got!r}"
        )


def fields_of(recipe: Float8Recipe) -> Any:
    """Returns the fields that native code makes its recipe of."""
    formats = (recipe.forward_dtype, recipe.grad_dtype)
    return (*formats, recipe.fast_accumulate, recipe.ops, recipe.small_size)


def _from_native(fields: Any) -> Float8Recipe:
    values: list[Any] = [tuple(each) if isinstance(each, list) else each for each in fields]
    return Float8Recipe(*values)


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
    set_default = _C.set_default_float8  # At exit the block may end after the module's names.
    set_default(device_type, fields_of(recipe))
    try:
        yield
    finally:
        set_default(device_type, None)


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
        The arguments of a region of the base dtype, and the number of the recipe, 0 for none.

    Raises:
        TypeError: ``float8`` or ``dtype`` has another type.
        ValueError: The arguments contradict one another, or the recipe is impossible.
    """
    if not (float8 is None or isinstance(float8, (bool, Float8Recipe))):
        got = type(float8).__name__
        raise TypeError(f"autocast: expected float8 to be a bool or a float8.Recipe, got {got}")
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
    base_dtype = torch.bfloat16 if dtype is None else dtype
    recipe = float8 if isinstance(float8, Float8Recipe) else Float8Recipe()
    number = _C.float8_number(device_type, fields_of(recipe), base_dtype)
    return (device_type, base_dtype, enabled, cache_enabled), number


def named_parts(
    module: torch.nn.Module, name: str = "", above: tuple[torch.nn.Module, ...] = ()
) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and those below, under each of their names; named_modules has one name of each."""
    yield name, module
    above = (*above, module)
    for key, child in module._modules.items():
        if child is not None and not any(child is each for each in above):
            yield from named_parts(child, f"{name}.{key}" if name else key, above)


def has_name(dotted: str, pattern: str) -> bool:
    """Whether one or more whole parts of a dotted name fit a pattern of ``fnmatch``."""
    parts = dotted.split(".")
    starts = range(len(parts))
    runs = (".".join(parts[i:end]) for i in starts for end in range(i + 1, len(parts) + 1))
    return any(fnmatchcase(run, pattern) for run in runs)


Where: TypeAlias = str | type[torch.nn.Module] | Callable[[torch.nn.Module, str], bool]


def _selected(model: Any, where: Where) -> list[torch.Tensor]:
    """The parameters of a model that a name, a type or a function means."""
    if not isinstance(model, torch.nn.Module):
        got = type(model).__name__
        raise TypeError(f"float8.exclude: expected a module where `where` is given, got {got}")
    parts = list(named_parts(model))
    if isinstance(where, str):
        found: list[torch.Tensor] = [
            parameter
            for name, part in parts
            for key, parameter in part._parameters.items()
            if parameter is not None and has_name(f"{name}.{key}" if name else key, where)
        ]
        if not found:
            raise ValueError(
                f"float8.exclude: expected where to be a name of weights of the module, got "
                f"{where!r}, which no weight has. See docs/float8.md for how names are compared."
            )
        return found
    is_type = isinstance(where, type) and issubclass(where, torch.nn.Module)
    if not is_type and (isinstance(where, type) or not callable(where)):
        raise TypeError(
            f"float8.exclude: expected where to be a name, a type of modules or a function, got "
            f"{where!r}"
        )
    meant = [
        part
        for name, part in parts
        if (isinstance(part, where) if isinstance(where, type) else where(part, name))
    ]
    return [parameter for part in meant for parameter in part.parameters()]


class float8_exclude(WeightRequest):  # noqa: N801 (reads as what it does)
    """Keeps the products of some weights out of fp8, in all regions of the process.

    For the head of a model, which loses the most by fp8::

        fastamp.float8.exclude(model.lm_head)
        fastamp.float8.exclude(model, where="lm_head")
        fastamp.float8.exclude(model, where=torch.nn.MultiheadAttention)
        fastamp.float8.exclude(model, where=lambda module, name: name.startswith("layers.0."))

    Works until :meth:`release`, as a ``with`` block, or as long as the weights live: they are held
    weakly. The weights are those that the module has now.

    Args:
        weights: A module (its parameters), a tensor or an iterable of tensors.
        where: Of a module, which weights; by default all. A name: one or more whole parts of a
            parameter's dotted name, with the wildcards of ``fnmatch`` if wanted. A type: the
            parameters of modules of it. A function of a module and its dotted name: those of
            modules for which it says so.

    Raises:
        TypeError: ``weights`` or ``where`` is something else.
        ValueError: ``where`` is a name that no weight has.
    """

    def __init__(
        self,
        weights: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
        *,
        where: Where | None = None,
    ) -> None:
        """Excludes them, at once."""
        if where is None:
            tensors = weights_of("float8.exclude", weights)
        else:
            tensors = _selected(weights, where)
        super().__init__(_C.exclude_from_float8(tensors), _end_exclusion)
        compiler.forget_graphs()


def _end_exclusion(number: int) -> None:
    _C.end_float8_exclusion(number)
    compiler.forget_graphs()
