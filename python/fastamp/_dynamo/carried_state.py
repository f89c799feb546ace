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
        if before == 0:
            _wrap()
        elif before + change == 0:
            _unwrap()


def _run_what_is_not_guarded_eagerly() -> None:
    compiler.run_eagerly(
        _policy_holders > 0
        or (_recipe_holders > 0 and not (_are_recipes_guarded and _C.can_mirror_float8()))
    )


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


class _Place:
    """A name that torch looks a function up by, and the wrapper that it finds meanwhile."""

    __slots__ = ("_wrapping", "name", "owner", "torchs", "wrapper")

    def __init__(self, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
        self.owner, self.name, self._wrapping = owner, name, wrapping
        self.torchs = self.wrapper = None

    def found(self, torchs: Any) -> None:
        """Makes a wrapper of what stands there now."""
        self.wrapper, self.torchs = self._wrapping(torchs), torchs


_wrapped: list[_Place] = []


def _wrap() -> None:
    # Blocks are frequent, and short: wrappers are made once.
    for place in _places(_COMPOSABLE in sys.modules):
        torchs = vars(place.owner)[place.name]
        if torchs is not place.torchs:
            place.found(torchs)
        _wrapped.append(place)
        setattr(place.owner, place.name, place.wrapper)


def _unwrap() -> None:
    for place in _wrapped:
        setattr(place.owner, place.name, place.torchs)
    _wrapped.clear()


@functools.cache
def _places(with_composable: bool) -> list[_Place]:
    places = [_Place(torch.utils.checkpoint.CheckpointFunction, "forward", _in_forward)]
    modules = [torch.utils.checkpoint, *([sys.modules[_COMPOSABLE]] if with_composable else [])]
    for module in modules:
        # The innermost that there is: wrapping both would only nest blocks.
        names = [name for name in _GENERATORS if name in vars(module)]
        places += [_Place(module, name, _following) for name in names[:1]]
    for module in _PARALLEL:
        places.append(_Place(module, "parallel_apply", _applying))
        places.append(_Place(module, "replicate", _replicating))
    return places


def _in_forward(torchs: Any) -> Any:
    torch_forward = getattr(torchs, "__func__", torchs)

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return torch_forward(ctx, _carrying(run_function), *args)

    return staticmethod(forward)


def _following(torch_generator: Callable[..., Any]) -> Callable[..., Any]:
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torch_generator(_carrying(fn), *args, **kwargs)

    return generator


# DataParallel calls its replicas in threads of its own, which get of autocast's state only whether
# it is on. Its functions, and programs that do as it does, look the names up in these modules.
_PARALLEL = (torch.nn.parallel, sys.modules["torch.nn.parallel.data_parallel"])


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
