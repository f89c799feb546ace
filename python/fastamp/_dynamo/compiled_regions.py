# SPDX-License-Identifier: Apache-2.0
"""Regions inside compiled functions: one that raises leaves them, as ``with`` does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, is_autocast_available

import fastamp._C as _C
from fastamp._dynamo import compiler

_State = tuple[int, int, bool, dict[str, tuple[bool, torch.dtype]]]


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    """The device types that this torch has autocast for."""
    types = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
    return tuple(each for each in types if is_autocast_available(each))


def _state() -> _State:
    devices = {
        each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
        for each in autocast_devices()
    }
    return _C.open_regions(), _C.region_depth(), torch.is_autocast_cache_enabled(), devices


def _restore(state: _State) -> None:
    regions, depth, cache_enabled, devices = state
    _C.leave_regions_above(regions)  # those of torch's class, too, while fastamp is installed
    was_left = _C.region_depth() > depth
    while _C.region_depth() > depth:
        torch.autocast_decrement_nesting()
    torch.set_autocast_cache_enabled(cache_enabled)
    for device, (enabled, dtype) in devices.items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    if was_left and depth == 0:
        torch.clear_autocast_cache()


def _restoring(compiled: Callable[..., Any]) -> Callable[..., Any]:
    is_module = isinstance(compiled, torch.nn.Module)  # whose attributes are its parameters

    @functools.wraps(compiled, updated=() if is_module else functools.WRAPPER_UPDATES)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = _state()
        try:
            return compiled(*args, **kwargs)
        except BaseException:
            _restore(found)
            raise

    return run


def _enters_regions(graph: torch.fx.GraphModule) -> bool:
    graphs = (each for each in graph.modules() if isinstance(each, torch.fx.GraphModule))
    return any(node.target is _enter_autocast for each in graphs for node in each.graph.nodes)


def _prepare_dynamo() -> None:
    from torch._dynamo.output_graph import OutputGraph

    torch_call: Any = getattr(OutputGraph, "call_user_compiler", None)
    if torch_call is None:
        return  # Another torch.

    @functools.wraps(torch_call)
    def call_user_compiler(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        enters = _enters_regions(gm)  # Backends may change the graph.
        compiled = torch_call(self, gm, *args, **kwargs)
        # What compilers make that know regions has traced them away, and may be of other types.
        return _restoring(compiled) if enters and _is_plain(compiled) else compiled

    OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]


def _is_plain(compiled: Any) -> bool:
    return isinstance(compiled, (FunctionType, MethodType, torch.fx.GraphModule))


compiler.when_dynamo_loads(_prepare_dynamo)
