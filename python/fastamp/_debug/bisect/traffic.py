# SPDX-License-Identifier: Apache-2.0
"""Predicts times of ops on a GPU with tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastamp._debug.watch.flops import flops_of
from fastamp._debug.watch.modules import is_half

__all__ = ["Traffic", "time_of"]

#: Products per byte of memory traffic, in 16 and 32 bits: the data sheet of H100 SXM has 989 and
#: 67 TFLOP/s, and 3.35 TB/s.
_FLOPS_PER_BYTE_16 = 295.0
_FLOPS_PER_BYTE_32 = 20.0


def time_of(func: Any, args: Any, kwargs: Any, result: Any, *, widened: bool = False) -> float:
    """The time of an op, in bytes of memory traffic: of that or of its products, the longer one.

    Args:
        func: The op.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        result: What it returned.
        widened: Whether to take 16-bit tensors for float32.
    """
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return 0.0  # a view
    leaves = tree_leaves((args, kwargs, result))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    halves = sum(t.numel() * t.element_size() for t in tensors if is_half(t))
    traffic = sum(t.numel() * t.element_size() for t in tensors) + (halves if widened else 0)
    is_low = halves > 0 and not widened
    rate = _FLOPS_PER_BYTE_16 if is_low else _FLOPS_PER_BYTE_32
    return max(float(traffic), flops_of(func, args, kwargs, result) / rate)


class Traffic(TorchDispatchMode):
    """Looks at all ops that run inside the block, forward and backward.

    Attributes:
        time: Of all of them, see :func:`time_of`.
        low: Names of those that computed something in 16 bits.
    """

    def __init__(self) -> None:
        """Has seen nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.time = 0.0
        self.low: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for each op."""
        result = func(*args, **(kwargs or {}))
        time = time_of(func, args, kwargs or {}, result)
        self.time += time
        if time and any(is_half(leaf) for leaf in tree_leaves((args, kwargs))):
            self.low.add(str(func.name()))
        return result
