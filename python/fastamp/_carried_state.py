# SPDX-License-Identifier: Apache-2.0
"""State of fastamp's own beside torch's autocast state, where torch has no place for it.

That is: op policies of a block, and the fp8 recipes of regions. torch hands its own state to what
it recomputes and guards compiled code by it; ours is carried here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

import fastamp._C as _C
from fastamp import _compile

_lock = threading.Lock()
_holders = 0


def hold() -> None:
    """Some thread has state of ours from now on, until it calls :func:`let_go`.

    Meanwhile checkpoint is wrapped and compiled functions run eagerly, in all threads.
    """
    global _holders
    with _lock:
        if _holders == 0:
            _follow_checkpoints()
            _compile.run_eagerly(True)
        _holders += 1


def let_go() -> None:
    """Ends a :func:`hold`."""
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            _compile.run_eagerly(False)
            _forget_checkpoints()


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made to run under the policies and recipes that this thread has now."""
    overrides = _C.thread_op_policies()
    recipes = _C.float8_numbers()

    def run(*args: Any, **kwargs: Any) -> Any:
        hold()
        found = _C.float8_numbers()
        pushed = _C.push_op_policies(overrides, True) if overrides else None
        _C.set_float8_numbers(recipes)
        try:
            return function(*args, **kwargs)
        finally:
            _C.set_float8_numbers(found)
            if pushed is not None:
                _C.pop_op_policies(pushed)
            let_go()

    return run


# torch.utils.checkpoint hands autocast's public state to its recomputation and has no place for
# ours. All its variants get the function to recompute through names that are looked up at each
# call, so those names are wrapped, and only while some thread has state of ours. The function is
# their first argument. From 2.15 on, if not before, the generator has an _impl that is called
# instead.
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_GENERATOR = "_checkpoint_without_reentrant_generator"
_GENERATORS = (f"{_GENERATOR}_impl", _GENERATOR)
_wrapped: list[tuple[Any, str, Any]] = []


def _wrap(owner: Any, name: str, replacement: Any) -> None:
    _wrapped.append((owner, name, vars(owner)[name]))
    setattr(owner, name, replacement)


def _follow_checkpoints() -> None:
    reentrant: Any = torch.utils.checkpoint.CheckpointFunction
    torch_forward = reentrant.forward

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return torch_forward(ctx, _carrying(run_function), *args)

    _wrap(reentrant, "forward", staticmethod(forward))
    for module in (torch.utils.checkpoint, sys.modules.get(_COMPOSABLE)):
        # The innermost that there is: wrapping both would only nest blocks.
        name = (
            next((name for name in _GENERATORS if name in vars(module)), None) if module else None
        )
        if name is not None:
            _wrap(module, name, _following(vars(module)[name]))


def _following(torch_generator: Callable[..., Any]) -> Callable[..., Any]:
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torch_generator(_carrying(fn), *args, **kwargs)

    return generator


def _forget_checkpoints() -> None:
    while _wrapped:
        setattr(*_wrapped.pop())
