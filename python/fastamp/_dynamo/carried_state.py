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
from collections.abc import Callable
from typing import Any

import torch.nn.parallel
import torch.utils.checkpoint

import fastamp._C as _C
from fastamp._dynamo import compiler

_are_recipes_guarded = True


def hold(policies: bool = True) -> None:
    """Notes that some thread has state of fastamp from now on, until it calls :func:`let_go`.

    Meanwhile checkpoint and DataParallel are wrapped, in all threads, and compiled functions run
    eagerly if their guards do not see the state.

    Args:
        policies: It is op policies, and maybe recipes; else recipes alone.

    Raises:
        RuntimeError: Compiled functions have to run eagerly, and one is running.
    """
    if not policies:
        _C.set_recipes_guarded(_are_recipes_guarded and _C.can_mirror_float8())
    _C.hold_state(policies)


def let_go(policies: bool = True) -> None:
    """Ends a :func:`hold` of the same kind."""
    _C.let_go_of_state(policies)


def recipes_are_not_guarded() -> None:
    """Makes compiled functions run eagerly in regions with a recipe from now on."""
    global _are_recipes_guarded
    _are_recipes_guarded = False
    _C.set_recipes_guarded(False)


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
_GENERATORS = [f"{_GENERATOR}_impl", _GENERATOR]


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


_C.set_names_while_held(
    [
        (torch.utils.checkpoint.CheckpointFunction, ["forward"], _in_forward),
        # The innermost that there is: wrapping both would only nest blocks.
        (torch.utils.checkpoint, _GENERATORS, _following),
        (_COMPOSABLE, _GENERATORS, _following),
        *((module, ["parallel_apply"], _applying) for module in _PARALLEL),
        *((module, ["replicate"], _replicating) for module in _PARALLEL),
    ]
)


def _run_eagerly_if_held() -> None:
    """Has the native code do what ``torch.compiler.set_stance`` does, in a tenth of its time."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo import eval_frame

    eager = eval_frame.DynamoStance("force_eager")
    _C.set_names_while_eager([(eval_frame, ["_stance"], lambda _: eager)], get_eval_frame_callback)


compiler.when_dynamo_loads(_run_eagerly_if_held)
