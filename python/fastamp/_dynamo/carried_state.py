# SPDX-License-Identifier: Apache-2.0
"""State of fastamp's own beside torch's autocast state, where torch has no place for it.

That is: op policies of a block, and the fp8 recipes of regions. torch hands its own state to what
it recomputes and to replicas, and guards compiled code by it; fastamp's is carried here. (Guards
see recipes, too, where they are as in the torch that fastamp knows: see
``src/float8/dynamo_guard_state.h``.)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.nn.parallel
import torch.utils.checkpoint

import fastamp._C as _C
from fastamp._dynamo import compiler

_lock = threading.Lock()
_policy_holders = 0
_recipe_holders = 0
_are_recipes_guarded = True


def hold(policies: bool = True) -> None:
    """Notes that some thread has state of fastamp from now on, until it calls :func:`let_go`.

    Meanwhile checkpoint and DataParallel are wrapped, in all threads, and compiled functions run
    eagerly if their guards do not see the state.

    Args:
        policies: It is op policies, and maybe recipes; else recipes alone.
    """
    _count(policies, 1)


def let_go(policies: bool = True) -> None:
    """Ends a :func:`hold` of the same kind."""
    _count(policies, -1)


def _count(policies: bool, change: int) -> None:
    global _policy_holders, _recipe_holders
    if sys.is_finalizing():
        return  # A daemon thread that the end of the process stopped may have the lock for good.
    with _lock:
        before = _policy_holders + _recipe_holders
        if policies:
            _policy_holders += change
        else:
            _recipe_holders += change
        _run_what_is_not_guarded_eagerly()
        after = _policy_holders + _recipe_holders
        if before == 0:
            _follow_checkpoints()
            _follow_replicas()
        elif after == 0:
            _unwrap()


def _run_what_is_not_guarded_eagerly() -> None:
    is_guarded = _are_recipes_guarded and _C.can_mirror_float8()
    unguarded = _recipe_holders > 0 and not is_guarded
    compiler.run_eagerly(_policy_holders > 0 or unguarded)


def recipes_are_not_guarded() -> None:
    """From now on compiled functions run eagerly in regions with a recipe."""
    global _are_recipes_guarded
    with _lock:
        _are_recipes_guarded = False
        _run_what_is_not_guarded_eagerly()


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made to run under the policies and recipes that this thread has now."""
    overrides = _C.thread_op_policies()
    recipes = _C.float8_numbers()

    def run(*args: Any, **kwargs: Any) -> Any:
        hold(policies=bool(overrides))
        found = _C.float8_numbers()
        pushed = _C.push_op_policies(overrides, True) if overrides else None
        _C.set_float8_numbers(recipes)
        try:
            return function(*args, **kwargs)
        finally:
            _C.set_float8_numbers(found)
            if pushed is not None:
                _C.pop_op_policies(pushed)
            let_go(policies=bool(overrides))

    return run


# torch.utils.checkpoint hands autocast's public state to its recomputation and has no place for
# fastamp's. All its variants get the function to recompute through names that are looked up at each
# call, so those names are wrapped, and only while some thread has state of fastamp. The function is
# their first argument. From 2.14 on the generator has an _impl that is called instead.
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_GENERATOR = "_checkpoint_without_reentrant_generator"
_GENERATORS = (f"{_GENERATOR}_impl", _GENERATOR)
_wrapped: list[tuple[Any, str, Any]] = []


def _wrap(owner: Any, name: str, replacement: Any) -> None:
    _wrapped.append((owner, name, vars(owner)[name]))
    setattr(owner, name, replacement)


# DataParallel calls its replicas in threads of its own, which get of autocast's state only whether
# it is on. Its functions, and programs that do as it does, look the names up in these modules.
_PARALLEL = (torch.nn.parallel, sys.modules["torch.nn.parallel.data_parallel"])


def _follow_replicas() -> None:
    for module in _PARALLEL:
        _wrap(module, "parallel_apply", _applying(vars(module)["parallel_apply"]))
        _wrap(module, "replicate", _replicating(vars(module)["replicate"]))


def _applying(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torch_function)
    def parallel_apply(modules: Any, *args: Any, **kwargs: Any) -> Any:
        return torch_function([_in_replica(module) for module in modules], *args, **kwargs)

    return parallel_apply


def _in_replica(module: Callable[..., Any]) -> Callable[..., Any]:
    """The replica, made to run under this thread's policies and recipes."""
    carried = _carrying(module)
    # A recipe is in force in regions of its base dtype alone.
    base_dtypes = {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if _C.float8_recipe(device) is not None
    }

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in base_dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            return carried(*args, **kwargs)

    return run


def _replicating(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torch_function)
    def replicate(network: Any, *args: Any, **kwargs: Any) -> Any:
        replicas = torch_function(network, *args, **kwargs)
        # Copies of excluded weights are excluded; they live for one call.
        _C.exclude_from_float8(
            [
                copied._former_parameters[name]
                for replica in replicas
                for module, copied in zip(network.modules(), replica.modules(), strict=True)
                for name, parameter in module._parameters.items()
                if parameter is not None and _C.is_excluded_from_float8(parameter)
            ]
        )
        return replicas

    return replicate


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


def _unwrap() -> None:
    while _wrapped:
        setattr(*_wrapped.pop())
