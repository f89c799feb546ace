# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients by their norm, with the norm that unscaling has already computed."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fastamp._C as _C
from fastamp._scaler.mesh_norm import norm_over_ranks, shard_groups, with_own_meshes
from fastamp._scaler.subclasses import multiply_subclasses

if TYPE_CHECKING:
    from fastamp._scaler.mesh_norm import Shards


def check_finite(total_norm: Tensor, norm_type: float) -> None:
    """Refuses a norm that is inf or NaN, in torch's words. Waits for the device."""
    if not math.isfinite(total_norm.item()):
        raise RuntimeError(
            f"clip_grad_norm_: expected finite gradients, got a norm of {total_norm.item()}: "
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _edits_may_be_uncounted() -> bool:
    # Collectives write gradients without counting a version.
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _clip_over_ranks(
    parameters: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool, mesh: Shards
) -> Tensor:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups = shard_groups("clip_grad_norm_", mesh, norm_type)
    groups = with_own_meshes("clip_grad_norm_", parameters, groups)
    norm = norm_over_ranks(parameters, groups, norm_type)
    if error_if_nonfinite:
        check_finite(norm, norm_type)
    gradients = _C.gather_parameters(parameters)
    coefficient = _C.clip_coefficient(norm, float(max_norm))
    gradients.multiply_(coefficient)
    multiply_subclasses(gradients.foreign, coefficient)
    return norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: Shards | None = None,
) -> Tensor:
    """Scales gradients in place so that their norm is at most ``max_norm``.

    A drop-in for ``torch.nn.utils.clip_grad_norm_``. If the gradients are exactly those that
    ``GradScaler.unscale_`` of fastamp has just unscaled, of one optimizer or several, their norm is
    known already and they are not read again; else they are read once. Gradients that need no
    scaling are not written. The 2-norm is summed in fp64. Do not use it after editing gradients in
    ways that torch does not count as in-place edits (``.data``, NumPy) between the two calls; in a
    program of several processes nothing is reused, since collectives are such edits.

    Args:
        parameters: A tensor or an iterable of tensors; those without gradients are left out.
        max_norm: Largest norm that is left.
        norm_type: Order of the norm; may be ``inf``. Orders but 2 are computed by torch.
        error_if_nonfinite: Refuse a norm that is inf or NaN; waits for the device.
        foreach: Passed on to torch where it does the work.
        mesh: The norm is that over all ranks whose gradients are shards of one model, and every
            rank of the mesh has to call this. A ``DeviceMesh`` (or a part, ``mesh["pp", "tp"]``)
            over all dimensions of which all gradients are sharded; or a mapping that says which
            ones: from a process group, or mesh, to the parameters of this rank that are shards over
            it (``None``: all). Over all other groups gradients are replicas, and are counted once.
            DTensors know their own mesh, which must not be named again.

    Returns:
        The norm before clipping, a scalar of torch's dtype; with ``mesh``, float32 unless there are
        gradients in float64.

    Raises:
        RuntimeError: The norm is not finite, with ``error_if_nonfinite``. Nothing was changed.
        TypeError: ``mesh`` is something else.
        ValueError: ``mesh`` lacks this process, names a group twice or one of a DTensor's mesh, or
            comes with a ``norm_type`` that is not above 0.
    """
    if mesh is not None:
        return _clip_over_ranks(parameters, max_norm, float(norm_type), error_if_nonfinite, mesh)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, types.GeneratorType):  # torch warns of empty generators.
        parameters = list(parameters)
    if isinstance(parameters, list) and all(isinstance(item, Tensor) for item in parameters):
        gradients = _C.gather_parameters(parameters)
        dtype = None if gradients.foreign else gradients.norm_dtype
        if dtype is not None and float(norm_type) == 2.0:
            norm = None if _edits_may_be_uncounted() else gradients.recent_norm(dtype)
            norm = gradients.two_norm(dtype) if norm is None else norm
            if norm is not None:
                if error_if_nonfinite:
                    check_finite(norm, float(norm_type))
                gradients.multiply_(_C.clip_coefficient(norm, float(max_norm)))
                return norm
    clip: Any = torch.nn.utils.clip_grad_norm_
    result: Tensor = clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return result
