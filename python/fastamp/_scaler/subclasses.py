# SPDX-License-Identifier: Apache-2.0
"""Gradients that are Python tensor subclasses, which C++ must not look inside."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fastamp._scaler.all_reduce import all_reduce
from fastamp._util.tensors import on_device

if TYPE_CHECKING:
    from torch import Tensor


def as_dtensor(tensor: Tensor) -> Any:
    """Returns a tensor if it is a DTensor, else None."""
    module = sys.modules.get("torch.distributed.tensor")  # Not imported: then there are none.
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


Meshes = dict[Any, dict["torch.device", None]]


def meshes_of(optimizer: Any) -> Meshes:
    """Returns the meshes that parameters are laid out on, and on which devices, in their order.

    Also of parameters without gradients: other ranks of the mesh may have some. Looks at parameters
    in programs that can have DTensors only.
    """
    meshes: Meshes = {}
    if "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized():
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            laid_out = as_dtensor(parameter)
            if laid_out is not None:
                meshes.setdefault(laid_out.device_mesh, {})[laid_out.device] = None
    return meshes


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    if gradient.dtype is torch.float16:
        # Sums of duplicates can overflow although every summand is finite.
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()


def distinct(parameters: list[Tensor]) -> list[Tensor]:
    """Returns parameters so that each of their gradients comes once, as it is unscaled once."""
    by_gradient: dict[int, tuple[Any, Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad  # Kept meanwhile: a property may make it anew, at any address.
        by_gradient.setdefault(id(gradient), (gradient, parameter))
    return [parameter for _, parameter in by_gradient.values()]


Counted = tuple[list["Tensor"], "Tensor"]


class _Unscaling:
    """One call of :func:`unscale_subclasses`."""

    def __init__(
        self, flags: dict[torch.device, Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        self.flags, self.inv_scale, self.found_inf = flags, inv_scale, found_inf
        self.counted: list[Counted] = []

    def flag_on(self, device: torch.device) -> Tensor:
        if device not in self.flags:
            self.flags[device] = on_device(self.found_inf, device).clone()
        return self.flags[device]

    def inverse_on(self, device: torch.device) -> Tensor:
        return on_device(self.inv_scale, device)

    def unscale(self, pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """Unscales plain tensors, given with their parameters, and counts."""
        gradients = [gradient for _, gradient in pairs]
        counts = torch.zeros((len(gradients), 2), dtype=torch.int64, device=device)
        torch.ops.fastamp.unscale_and_check_(
            gradients, self.inverse_on(device), self.flag_on(device), non_finite_counts=counts
        )
        self.counted.append(([parameter for parameter, _ in pairs], counts))


@torch.no_grad()
def agree_over_meshes(meshes: Meshes, flags: dict[torch.device, Tensor], found_inf: Tensor) -> None:
    """Agrees on flags, by MAX, with all ranks of some meshes: a collective for each dimension.

    Every rank has to reach them, also one without gradients.

    Args:
        meshes: From :func:`meshes_of`.
        flags: The flag of each device; entries are added and raised.
        found_inf: The flag that new entries start from.
    """
    for mesh, devices in meshes.items():
        for device in devices:
            if device not in flags:
                flags[device] = on_device(found_inf, device).clone()
            for dim in range(mesh.ndim):
                all_reduce(flags[device], True, mesh.get_group(dim), "agree on an overflow")


@torch.no_grad()
def unscale_subclasses(
    parameters: list[Tensor],
    flags: dict[torch.device, Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
) -> list[Counted]:
    """Unscales the gradients of some parameters in place.

    DTensors are unscaled where their shards are. Plain gradients of parameters that are subclasses
    are unscaled as usual. Gradients of other subclasses get torch's own operator, for which they
    may have a definition.

    Args:
        parameters: Tensors whose gradients are subclasses.
        flags: The non-finite flag of each device met so far; entries are added and raised.
        inv_scale: 1 / scale, an fp32 scalar.
        found_inf: The flag that new entries start from.

    Returns:
        (parameters, int64 counts [n, 2] of inf and NaN, zeros if there were none) of those counted.
    """
    plain: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    others: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    unscaling = _Unscaling(flags, inv_scale, found_inf)
    for parameter in distinct(parameters):
        gradient: Any = _gradient_of(parameter)
        device = gradient.device
        if as_dtensor(gradient) is not None:
            local = gradient.to_local()
            plain.setdefault(local.device, []).append((parameter, local))
        elif type(gradient) is torch.Tensor and device.type in ("cpu", "cuda"):
            plain.setdefault(device, []).append((parameter, gradient))
        else:
            others.setdefault((device, gradient.dtype), []).append(gradient)
    for device, pairs in plain.items():
        unscaling.unscale(pairs, device)
    for (device, _), gradients in others.items():
        inverse, flag = unscaling.inverse_on(device), unscaling.flag_on(device)
        # torch's operator checks what it reads; the second call, what the first has written.
        for factor in (inverse, torch.ones_like(inverse)):
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, factor)
    return unscaling.counted


def norm_with_subclasses(
    gradients: list[Tensor], parameters: list[Tensor], norm_type: float
) -> Tensor:
    """Returns torch's norm, of DTensors on several meshes and plain tensors together too.

    Args:
        gradients: Plain ones.
        parameters: Those whose gradients are subclasses.
        norm_type: Order of the norm.
    """
    groups: dict[Any, list[Any]] = {}
    for gradient in [*gradients, *(parameter.grad for parameter in distinct(parameters))]:
        groups.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    total: Any = torch.nn.utils.get_total_norm
    norms: list[Any] = [total(group, norm_type) for group in groups.values()]
    # A DTensor's norm is spread over its mesh until it is asked for in full: a collective.
    whole: list[Tensor] = [
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms
    ]
    if len(whole) == 1:
        return whole[0]
    home = whole[0].device
    stacked = torch.stack([norm.to(home) for norm in whole])
    total_norm: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total_norm


@torch.no_grad()
def multiply_subclasses(parameters: list[Tensor], factor: Tensor) -> None:
    """Multiplies the gradients of some parameters in place, those of DTensors shard by shard."""
    for parameter in distinct(parameters):
        gradient: Any = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.mul_(on_device(factor, local.device))
