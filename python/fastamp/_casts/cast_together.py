# SPDX-License-Identifier: Apache-2.0
"""Weights of a region cast in one launch."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

import fastamp._C as _C
from fastamp._casts.kept_casts import WeightRequest, weights_of

__all__ = ["together"]


class together(WeightRequest):  # noqa: N801 (reads as what it does)
    """Casts the weights of an autocast region together, on CUDA in one launch (to fp8 in two).

    The first weight that a region casts brings along those of the last region on this thread that
    began with the same weight. Works until :meth:`release` or as a ``with`` block. Only weights
    whose storage has not moved since then join; values, dtypes and gradients stay torch.amp's bit
    for bit. A weight that a region did not use is not cast ahead by the next one, and nothing is
    kept beyond a region.

    Parameters of FSDP modules and of modules with hooks of Accelerate (``_hf_hook``), which come
    and go during the forward pass, are left out.

    Warning:
        All weights are read when the **first** one is used. A hook of your own that fills a later
        weight in place during the forward pass, on another stream or without moving its version
        counter, comes too late.

    Args:
        weights: A module (its parameters), a tensor or an iterable of tensors.

    Raises:
        TypeError: ``weights`` is something else.
    """

    def __init__(self, weights: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Starts casting together, in regions that begin like an earlier one."""
        tensors = weights_of("casts.together", weights)
        if isinstance(weights, torch.nn.Module):
            managed = _managed_parameters(weights)
            tensors = [tensor for tensor in tensors if tensor not in managed]
        super().__init__(_C.acquire_cast_together(tensors), _C.release_cast_together)


def _managed_parameters(module: torch.nn.Module) -> set[torch.Tensor]:
    """Parameters whose memory other code fills and frees during the forward pass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    types = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    found: set[torch.Tensor] = set()
    for part in module.modules():
        if isinstance(part, types) or hasattr(part, "_hf_hook"):
            found.update(part.parameters())
    return found
