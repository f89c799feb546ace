# SPDX-License-Identifier: Apache-2.0
"""Gradients of an optimizer that native code leaves to Python."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fastamp._scaler.mesh_norm import norm_over_ranks, shard_groups
from fastamp._scaler.subclasses import multiply_subclasses, norm_with_subclasses

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Called by csrc/python_optimizer.cpp, which finds them here.
__all__ = [
    "clip_values",
    "multiply_subclasses",
    "norm_over",
    "norm_with_subclasses",
    "parameters_of",
]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Returns the parameters of all groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def norm_over(optimizer: Any, mesh: Any, norm_type: float) -> Callable[[], Tensor]:
    """Returns what computes the norm of an optimizer's gradients over several ranks."""
    groups = shard_groups("clip_grad_norm_", mesh, norm_type)
    return lambda: norm_over_ranks("clip_grad_norm_", parameters_of(optimizer), groups, norm_type)


def clip_values(optimizer: Any, clip_value: float) -> None:
    """Clips gradients by value, as torch does."""
    torch.nn.utils.clip_grad_value_(parameters_of(optimizer), clip_value)
