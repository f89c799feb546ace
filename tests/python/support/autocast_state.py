# SPDX-License-Identifier: Apache-2.0
"""torch's public autocast state, and everything of fastamp's that is global."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import fastamp
import fastamp._C as _C

DEVICES = ("cpu", "cuda")


def nesting() -> int:
    """Depth of open regions on this thread; torch has no getter."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def torch_state() -> dict[str, Any]:
    """What torch's public API says about autocast on this thread."""
    state: dict[str, Any] = {"cache": torch.is_autocast_cache_enabled(), "nesting": nesting()}
    for device in DEVICES:
        state[device] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return state


def set_torch_state(state: dict[str, Any]) -> None:
    torch.set_autocast_cache_enabled(state["cache"])
    for device in DEVICES:
        torch.set_autocast_enabled(device, state[device][0])
        torch.set_autocast_dtype(device, state[device][1])
    while nesting() > state["nesting"]:
        torch.autocast_decrement_nesting()
    while nesting() < state["nesting"]:
        torch.autocast_increment_nesting()


def fastamp_state() -> dict[str, Any]:
    policies = [(row.op, row.cpu, row.cuda) for row in fastamp.policies.table()]
    return {
        "installed": _C.kernels_registered(),
        "policies": policies,
        "recipes": _C.float8_numbers(),
    }


@contextmanager
def torch_kernels() -> Iterator[None]:
    """torch's own autocast kernels for a while."""
    _C.unregister_kernels()
    try:
        yield
    finally:
        _C.register_kernels()


def _torch_loses_gradients() -> bool:
    weight = torch.ones(1, 1, requires_grad=True)
    with (
        torch_kernels() if _C.kernels_registered() else nullcontext(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        with torch.no_grad():
            torch.mm(weight, weight)
        return not torch.mm(weight, weight).requires_grad


# torch 2.10 keeps a cast that was made without grad mode and hands it to ops that run with it, so
# that the weight gets no gradient; 2.11 does not. There torch is no reference for what comes after.
TORCH_LOSES_GRADIENTS = _torch_loses_gradients()


@contextmanager
def cuda_state(dtype: torch.dtype = torch.float16, enabled: bool = True) -> Iterator[None]:
    """Autocast on for cuda with no GPU, where torch.autocast would disable itself."""
    before = torch_state()
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        set_torch_state(before)
