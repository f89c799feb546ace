# SPDX-License-Identifier: Apache-2.0
"""fp8 in code that torch traces: what is traced, what its guards see, and what its caches know."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import fastamp._C as _C
from fastamp._dynamo import carried_state, compiler
from fastamp._dynamo.compiled_regions import autocast_devices
from fastamp._float8.recipe import Float8Recipe, float8_recipe, recipe_numbered


def _held_by(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a functional one wraps."""
    if type(tensor) is FunctionalTensor:
        held: torch.Tensor = torch._from_functional_tensor(tensor.elem)
        return held
    return tensor


def _is_traced(tensor: torch.Tensor) -> bool:
    return type(_held_by(tensor)) in (FakeTensor, torch.Tensor, torch.nn.Parameter)


def _is_parameter(tensor: torch.Tensor) -> bool:
    held = _held_by(tensor)
    return held.is_leaf and held.requires_grad


def _is_excluded(tensor: torch.Tensor) -> bool:
    held = _held_by(tensor)
    if not isinstance(held, FakeTensor):
        return _C.is_excluded_from_float8(held)
    converter: Any = held.fake_mode.fake_tensor_converter
    try:
        numbers, fakes = converter.meta_converter.describer.lookup_tensor, converter.tensor_memo
    except (
        AttributeError
    ):  # Another torch: in the base dtype, rather than a weight that is excluded.
        return True
    excluded = (fakes.get(numbers[t]) for t in list(numbers) if _C.is_excluded_from_float8(t))
    return any(fake is not None and _same_memory(held, fake) for fake in excluded)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
    )


_C.set_python_tensors(_is_traced, _is_parameter, _is_excluded)


def _guards_see_recipes() -> bool:
    """Whether dynamo's guard of global state distinguishes this thread's recipes."""
    try:
        from torch._C._dynamo.guards import GlobalStateGuard
    except ImportError:
        return False
    Float8Recipe(), Float8Recipe(grad_dtype=torch.float8_e4m3fn)
    found = _C.float8_numbers()
    states = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    guards = []
    try:
        for state in states:
            _C.set_float8_numbers(state)
            guards.append(GlobalStateGuard())
        for state in states:
            _C.set_float8_numbers(state)
            if [guard.check() for guard in guards] != [state == other for other in states]:
                return False
    finally:
        _C.set_float8_numbers(found)
    return True


def _look_at_guards() -> None:
    if not _guards_see_recipes():
        carried_state.recipes_are_not_guarded()


def _cache_key() -> tuple[Any, ...]:
    """Returns what the graph of a compiled function depends on and its code does not show."""
    recipes = [str(recipe_numbered(number) if number else None) for number in _C.float8_numbers()]
    return _C.build_info()["version"], recipes


def _region_key() -> list[tuple[str, bool, str]]:
    """Returns the dtype that is in force on each device."""
    return [
        (each, torch.is_autocast_enabled(each), str(torch.get_autocast_dtype(each)))
        for each in autocast_devices()
    ]


def _extend_cache_key() -> None:
    """Lets torch's cache of traced functions know dtypes and recipes.

    Up to torch 2.12 its keys have one bit of autocast: that it is on somewhere.
    """
    import torch._functorch._aot_autograd.autograd_cache as cache

    try:
        details, bypass = cache.AOTAutogradCacheDetails, cache.BypassAOTAutogradCache
    except AttributeError:
        carried_state.recipes_are_not_guarded()
        return
    torch_init: Any = details.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torch_init(self, *args, **kwargs)
        if torch._C._is_any_autocast_enabled():
            self.fastamp_dtypes = _region_key()
        if any(_C.float8_numbers()):
            if _C.are_weights_excluded_from_float8():
                raise bypass("fastamp: excluded weights have no names")
            self.fastamp_float8 = _cache_key()

    details.__init__ = init  # type: ignore[method-assign]


def _traced_recipe(device_type: str) -> Any:
    """Traced by dynamo instead of ``float8.recipe``."""
    return _recipe_of_trace(device_type)


def _recipe_of_trace(device_type: str) -> Float8Recipe | None:
    return float8_recipe(device_type)


def _prepare_dynamo() -> None:
    _look_at_guards()
    compiler.trace_as_constant(_recipe_of_trace)
    compiler.trace_as(float8_recipe, _traced_recipe)
    compiler.when_loaded("torch._functorch._aot_autograd.autograd_cache", _extend_cache_key)


compiler.when_dynamo_loads(_prepare_dynamo)
