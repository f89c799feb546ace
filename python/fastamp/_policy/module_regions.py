# SPDX-License-Identifier: Apache-2.0
"""Calls in other regions than those around them, as dynamo can trace them, too; and fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fastamp._autocast.region import autocast
from fastamp._policy.policy_file import DEVICES
from fastamp._util.stepwise import in_steps

__all__ = ["Call", "fp32", "run_in_dtype", "run_without_autocast"]

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_LOW = (torch.float16, torch.bfloat16)
#: A function, its arguments and keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _in_regions(devices: Sequence[str], settings: dict[str, Any], call: Call) -> Any:
    if not devices:
        function, args, kwargs = call
        return function(*args, **kwargs)
    with autocast(devices[0], **settings):
        result = _in_regions(devices[1:], settings, call)
    return result  # noqa: RET504  (dynamo of torch 2.11 cannot trace a return out of a block)


def _devices_in_regions() -> list[str]:
    return [device for device in DEVICES if torch.is_autocast_enabled(device)]


def run_without_autocast(call: Call, cast_up: bool) -> Any:
    """Calls a function with autocast off.

    Args:
        call: The function and its arguments.
        cast_up: Whether 16-bit arguments become float32, on the devices where autocast was on.
    """
    devices = _devices_in_regions()
    function, args, kwargs = call
    if devices and cast_up:
        args, kwargs = _up(args, devices), _up(kwargs, devices)
    return _in_regions(devices, {"enabled": False}, (function, args, kwargs))


def run_in_dtype(call: Call, dtype: torch.dtype) -> Any:
    """Calls a function in a region of a dtype, on the devices where autocast is on."""
    return _in_regions(_devices_in_regions(), {"dtype": dtype}, call)


def _up(value: Any, devices: Sequence[str]) -> Any:
    """The value with 16-bit tensors in float32; the same object if there are none in it."""
    if isinstance(value, torch.Tensor):
        is_low = value.dtype in _LOW and value.device.type in devices
        return value.to(torch.float32) if is_low else value
    if isinstance(value, (list, tuple)):
        items = [_up(item, devices) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    if type(value) is dict:  # others, such as caches of models, are objects that callers keep
        return {key: _up(item, devices) for key, item in value.items()}
    return value


def fp32(decorated: _Decorated) -> _Decorated:
    """Decorates a function, or a class of modules, to run in float32 inside autocast regions.

    ::

        @fastamp.policies.fp32
        class RMSNorm(torch.nn.Module): ...

    In a region, autocast is off during the call, and 16-bit floating tensors among the arguments
    are cast to float32, in lists, tuples and dicts, too; results are left as they are. Outside
    regions nothing changes. Of a generator, coroutine or async generator each step runs so; what is
    sent into it is left as it is. ``torch.utils.checkpoint`` recomputes and ``torch.compile``
    compiles the same. Regions that the code itself opens hold within it.

    Args:
        decorated: A function or method; or a subclass of ``torch.nn.Module``, whose ``forward`` is
            replaced. Subclasses that override ``forward`` are not concerned.

    Returns:
        A function that calls the given one; or the class itself.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(decorated, type):
        if not issubclass(decorated, torch.nn.Module):
            raise TypeError(
                "policies.fp32: expected a function or a subclass of torch.nn.Module, got the "
                f"class {decorated.__name__}"
            )
        decorated.forward = fp32(decorated.forward)
        return decorated
    if isinstance(decorated, torch.nn.Module) or not callable(decorated):
        raise TypeError(
            "policies.fp32: expected a function or a subclass of torch.nn.Module, got an object of "
            f"type {type(decorated).__name__}; for a module there is policies.for_modules"
        )

    def run_step(step: Callable[[], Any]) -> Any:
        return run_without_autocast((step, (), {}), cast_up=False)

    @functools.wraps(decorated)
    def run_in_fp32(*args: Any, **kwargs: Any) -> Any:
        return run_without_autocast((decorated, args, kwargs), cast_up=True)

    result: Any = in_steps(run_in_fp32, run_step, of=decorated) or run_in_fp32
    return result  # type: ignore[no-any-return]
