"""Unscaling of gradients that are Python tensor subclasses, which C++ must not look inside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # Not imported: then there are none.
    return module is not None and isinstance(tensor, module.DTensor)


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    if gradient.dtype is torch.float16:
        # Sums of duplicates can overflow although every summand is finite.
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()


def unscale_subclasses(
    parameters: list[Tensor],
    flags: dict[torch.device, Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
) -> None:
    """Unscales the gradients of some parameters in place.

    DTensors are unscaled where their shards are, and the flag is agreed on by MAX over their device
    mesh: one collective per mesh dimension, which every rank of the mesh reaches. All other
    subclasses get torch's own operator, for which they may have a definition.

    Args:
        parameters: Tensors whose gradients are subclasses.
        flags: The non-finite flag of each device met so far; entries are added and raised.
        inv_scale: 1 / scale, an fp32 scalar.
        found_inf: The flag that new entries start from.
    """
    by_mesh: dict[Any, dict[torch.device, list[Tensor]]] = {}
    others: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def flag_on(device: torch.device) -> Tensor:
        if device not in flags:
            flags[device] = found_inf.to(device=device, non_blocking=True, copy=True)
        return flags[device]

    with torch.no_grad():
        for parameter in parameters:
            gradient: Any = _gradient_of(parameter)
            if _is_dtensor(gradient):
                local = gradient.to_local()
                mesh = by_mesh.setdefault(gradient.device_mesh, {})
                mesh.setdefault(local.device, []).append(local)
            else:
                others.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for mesh, locals_of_device in by_mesh.items():
            for device, shards in locals_of_device.items():
                flag = flag_on(device)
                torch.ops.fastamp.unscale_and_check_(shards, inv_scale.to(device), flag)
                for dim in range(mesh.ndim):
                    torch.distributed.all_reduce(
                        flag, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim)
                    )
        for (device, _), gradients in others.items():
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, flag_on(device), inv_scale.to(device=device, non_blocking=True)
            )
