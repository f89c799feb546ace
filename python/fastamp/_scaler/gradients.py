# SPDX-License-Identifier: Apache-2.0
"""Gradients of an optimizer that native code leaves to Python."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fastamp._scaler.mesh_norm import (
    ShardGroup,
    norm_over_ranks,
    shard_groups,
    with_own_meshes,
)
from fastamp._scaler.subclasses import (
    meshes_of,
    multiply_subclasses,
    norm_with_subclasses,
    unscale_subclasses,
)
from fastamp._util.tensors import on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    import fastamp._C as _C

# Called by csrc/python_optimizer.cpp, which finds them here.
__all__ = [
    "check_is_optimizer",
    "clip_values",
    "meshes_of",
    "multiply_subclasses",
    "norm_groups",
    "norm_of_copies",
    "norm_over",
    "norm_with_subclasses",
    "parameters_of",
    "two_norm_of",
    "unscale_shards",
    "widen_gradients",
]


def check_is_optimizer(function: str, optimizer: Any) -> None:
    """Refuses what has no groups of parameters, for functions that torch's scaler has not.

    Raises:
        TypeError: Parameters, a model or something else was given.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{function}: expected optimizer to have param_groups, as a torch.optim.Optimizer has, "
            f"got {type(optimizer).__name__}"
        )


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Returns the parameters of all groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def norm_groups(optimizer: Any, mesh: Any, norm_type: float) -> list[ShardGroup]:
    """Returns the groups that a norm of an optimizer's gradients is over; none if it is local.

    Raises:
        TypeError, ValueError: As of ``mesh`` of ``clip_grad_norm_``.
    """
    groups = [] if mesh is None else shard_groups("clip_grad_norm_", mesh, norm_type)
    # torch's norm of DTensors has orders that no sum over ranks has.
    if not groups and not (norm_type > 0 and meshes_of(optimizer)):
        return []
    return with_own_meshes("clip_grad_norm_", parameters_of(optimizer), groups)


def widen_gradients(optimizer: Any) -> None:
    """Puts float32 gradients in the place of an optimizer's fp16 ones."""
    narrow = [
        (parameter, parameter.grad)
        for parameter in parameters_of(optimizer)
        if parameter.grad is not None and parameter.grad.dtype is torch.float16
    ]
    wide = _to_float32([gradient for _, gradient in narrow])
    for (parameter, _), gradient in zip(narrow, wide, strict=True):
        # Any: backward may bring fp16 again, and sums of both are float32.
        parameter.grad_dtype = None
        parameter.grad = gradient


def _to_float32(gradients: list[Tensor]) -> list[Tensor]:
    """Returns copies in float32: of dense gradients written together, with one launch for all."""

    def is_plain(gradient: Tensor) -> bool:
        return type(gradient) is torch.Tensor and not (gradient.is_sparse or gradient.requires_grad)

    if not all(map(is_plain, gradients)):
        return [gradient.float() for gradient in gradients]
    wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    if wide:
        with torch.no_grad():
            torch._foreach_copy_(wide, gradients)
    return wide


def two_norm_of(optimizer: Any) -> Tensor | None:
    """Returns the 2-norm of gradients of which some are tensor subclasses; None without any."""
    with_gradients = [p for p in parameters_of(optimizer) if p.grad is not None]
    return norm_with_subclasses([], with_gradients, 2.0) if with_gradients else None


def norm_over(optimizer: Any, mesh: Any, norm_type: float) -> Callable[[], Tensor] | None:
    """Returns what computes the norm of an optimizer's gradients over ranks; None if it is local.

    Raises:
        TypeError, ValueError: As :func:`norm_groups`.
    """
    groups = norm_groups(optimizer, mesh, norm_type)
    if not groups:
        return None
    return lambda: norm_over_ranks(parameters_of(optimizer), groups, norm_type)


def norm_of_copies(norm: Callable[[], Tensor], flags: Iterable[Tensor]) -> Callable[[], Tensor]:
    """A norm over ranks that is NaN, too, where another rank's copy of the gradients is not finite.

    Args:
        norm: The norm over shards: a rank does not see its copies.
        flags: Of the optimizer's gradients, on which all ranks of its meshes have agreed.
    """

    def over_copies() -> Tensor:
        total = norm()
        for flag in flags:
            others = total.isfinite() & (on_device(flag, total.device) != 0)
            total = total.masked_fill(others, math.nan)
        return total

    return over_copies


def unscale_shards(
    core: _C.ScalerCore,
    optimizer: Any,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
    times_scaled: int,
) -> dict[torch.device, Tensor]:
    """Unscales the gradients of an optimizer in place, those of tensor subclasses too.

    Args:
        core: Notes the pass.
        optimizer: Whose gradients they are.
        inv_scale: 1 / scale, an fp32 scalar.
        found_inf: The flag that those of devices start from.
        allow_fp16: Whether fp16 gradients are not refused.
        times_scaled: How often losses were scaled.

    Returns:
        The flag of each device, of this rank's gradients alone.
    """
    flags, subclassed = core.unscale_grads(
        optimizer, inv_scale, found_inf, allow_fp16, times_scaled
    )
    if subclassed:
        position = {id(p): i for i, p in enumerate(parameters_of(optimizer))}
        for counted, counts in unscale_subclasses(subclassed, flags, inv_scale, found_inf):
            core.note_foreign_counts(optimizer, [position[id(p)] for p in counted], counts)
    return flags


def clip_values(optimizer: Any, clip_value: float) -> None:
    """Clips gradients by value, as torch does; torch refuses parameters without gradients."""
    parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
    if parameters:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
