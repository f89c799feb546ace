# SPDX-License-Identifier: Apache-2.0
"""The decorator for code that always runs in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastamp._module_policies.regions import run_without_autocast
from fastamp._steps import in_steps

__all__ = ["fp32"]

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def fp32(decorated: _Decorated) -> _Decorated:
    """Decorates a function, or a class of modules, to run in float32 inside autocast regions.

    ::

        @fastamp.fp32
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
                "fp32: expected a function or a subclass of torch.nn.Module, got the class "
                f"{decorated.__name__}"
            )
        decorated.forward = fp32(decorated.forward)
        return decorated
    if isinstance(decorated, torch.nn.Module) or not callable(decorated):
        raise TypeError(
            "fp32: expected a function or a subclass of torch.nn.Module, got an object of type "
            f"{type(decorated).__name__}; for a module there is module_policies"
        )

    def run_step(step: Callable[[], Any]) -> Any:
        return run_without_autocast((step, (), {}), cast_up=False)

    @functools.wraps(decorated)
    def run_in_fp32(*args: Any, **kwargs: Any) -> Any:
        return run_without_autocast((decorated, args, kwargs), cast_up=True)

    result: Any = in_steps(run_in_fp32, run_step, of=decorated) or run_in_fp32
    return result  # type: ignore[no-any-return]
