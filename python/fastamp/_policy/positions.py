# SPDX-License-Identifier: Apache-2.0
"""Finds modules that compute positions, by the code that their calls run; and their policy."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from fastamp._policy.table import op_table

__all__ = ["POSITIONS", "computes_positions", "policies_of_positions", "rounded_frequencies"]

#: What ``policies.for_modules`` and policy files call it.
POSITIONS = "positions"

_LOW = (torch.float16, torch.bfloat16)
_CALLS = 3  # From forward() to sin() and cos(), through functions that it calls.
#: Ops in which positions meet frequencies, where torch lowers them.
_PRODUCTS = frozenset(
    [
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "einsum",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "matmul",
        "mm",
        "mv",
        "tensordot",
    ]
)


def policies_of_positions() -> dict[str, dict[str, str]]:
    """The op policies of a module that computes positions: products run in float32.

    Op policies, and no region that is off: what autocast runs in float32 anyway still does, and
    products of two dtypes that only a cast makes possible still are.
    """
    policies: dict[str, dict[str, str]] = {}
    for row in op_table():
        lowered = {"cpu": row.cpu_default, "cuda": row.cuda_default}
        devices = [device for device, policy in lowered.items() if policy == "lower"]
        if devices and row.op.partition(".")[0] in _PRODUCTS:
            op = row.op if "." in row.op else f"{row.op}.default"
            policies[op] = dict.fromkeys(devices, "fp32")
    return policies


def computes_positions(module: torch.nn.Module) -> bool:
    """Whether a module makes a table of sines and cosines, or turns vectors by such a table.

    Its code, or functions that it calls, name ``sin`` and ``cos``, or ``polar``; and it has no
    weights of products, in its parts neither, so that float32 costs next to nothing in it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if any(parameter.dim() > 1 for parameter in module.parameters()):
        return False
    names = {name.removesuffix("_") for name in _names_in(module.forward, type(module))}
    return {"sin", "cos"} <= names or "polar" in names


def rounded_frequencies(module: torch.nn.Module) -> list[str]:
    """Names of a module's buffers of frequencies that have 16 bits: positive and falling."""
    found = []
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype in _LOW and buffer.dim() == 1 and buffer.numel() > 1 and not buffer.is_meta:
            values = buffer.detach().float()
            if bool((values > 0).all() & (values.diff() < 0).all()):
                found.append(name)
    return found


def _is_torchs(scope: dict[str, Any]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] == "torch"


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _names_in(function: Any, owner: type) -> set[str]:
    """The names that a method of a class uses, and those in what it calls; not in torch's code."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = [(function, 0)]
    while waiting:
        each, depth = waiting.pop()
        each = getattr(each, "__func__", each)  # A method, also a static one.
        if not isinstance(each, types.FunctionType) or id(each) in seen:
            continue
        seen.add(id(each))
        # What a decorator has wrapped is no call further.
        waiting.append((getattr(each, "__wrapped__", None), depth))
        waiting += [(value, depth) for value in _held_by(each)]
        if _is_torchs(each.__globals__):
            continue
        used = {name for code in _codes_in(each.__code__) for name in code.co_names}
        names |= used
        if depth < _CALLS:
            waiting += [(called, depth + 1) for called in _called(used, each.__globals__, owner)]
    return names


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # It is empty.
            yield cell.cell_contents


def _called(used: set[str], scope: dict[str, Any], owner: type) -> Iterator[Any]:
    """Yields what names in a function may stand for: functions of its file or another, methods."""
    for name in used:
        value = scope.get(name)
        if isinstance(value, types.ModuleType) and not _is_torchs(vars(value)):
            yield from (vars(value).get(other) for other in used)
        yield value
        yield inspect.getattr_static(owner, name, None)
