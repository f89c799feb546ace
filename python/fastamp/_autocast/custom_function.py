# SPDX-License-Identifier: Apache-2.0
"""Decorators that give custom autograd Functions a defined autocast state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.amp.autocast_mode import _cast

from fastamp._autocast.region import autocast
from fastamp._float8.recipe import float8_recipe

__all__ = ["custom_bwd", "custom_fwd"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _check_device_type(function: str, device_type: Any) -> None:
    if not isinstance(device_type, str):
        raise ValueError(
            f"{function}: expected device_type to be a str such as 'cuda', "
            f"got {type(device_type).__name__}: Expected `device_type` of type `str`"
        )


@overload
def custom_fwd(
    fwd: _Function, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> _Function: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[_Function], _Function]: ...
def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorates ``forward`` of a ``torch.autograd.Function``, as ``torch.amp.custom_fwd``.

    Args:
        fwd: ``forward`` with ``ctx`` first; ``None`` makes a decorator.
        device_type: Device type whose autocast state counts, such as ``"cuda"``.
        cast_inputs: In a region, floating-point tensors among the arguments (float64 excepted, and
            only those on the device) are cast to this dtype, in containers too, and ``forward``
            runs with autocast off. ``None``: it runs in the state it is called in.

    Returns:
        The function. It notes on ``ctx`` what :func:`custom_bwd` needs.

    Raises:
        ValueError: ``device_type`` is not a str.
    """
    _check_device_type("custom_fwd", device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        ctx = args[0]
        ctx._dtype = torch.get_autocast_dtype(device_type)
        in_region = torch.is_autocast_enabled(device_type)
        ctx._fwd_used_autocast = in_region and cast_inputs is None
        ctx._float8 = float8_recipe(device_type)
        if cast_inputs is None or not in_region:
            return fwd(*args, **kwargs)
        with autocast(device_type=device_type, enabled=False):
            return fwd(
                *_cast(args, device_type, cast_inputs), **_cast(kwargs, device_type, cast_inputs)
            )

    return decorate_fwd


@overload
def custom_bwd(bwd: _Function, *, device_type: str) -> _Function: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[_Function], _Function]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorates ``backward`` to run in the autocast state of its ``forward``.

    As ``torch.amp.custom_bwd``; for a Function whose ``forward`` has :func:`custom_fwd`.

    Args:
        bwd: ``backward`` with ``ctx`` first; ``None`` makes a decorator.
        device_type: Device type whose autocast state counts, such as ``"cuda"``.

    Returns:
        The function.

    Raises:
        ValueError: ``device_type`` is not a str.
    """
    _check_device_type("custom_bwd", device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(*args: Any, **kwargs: Any) -> Any:
        ctx = args[0]
        enabled, dtype = ctx._fwd_used_autocast, ctx._dtype
        recipe = getattr(ctx, "_float8", None)  # torch's custom_fwd does not set it.
        region = (
            autocast(device_type=device_type, enabled=enabled, dtype=dtype)
            if recipe is None
            else autocast(device_type=device_type, enabled=enabled, dtype=dtype, float8=recipe)
        )
        with region:
            return bwd(*args, **kwargs)

    return decorate_bwd
