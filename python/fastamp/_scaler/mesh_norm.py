# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients whose shards lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import fastamp._C as _C
from fastamp._scaler.all_reduce import all_reduce
from fastamp._scaler.subclasses import as_dtensor, distinct, norm_with_subclasses
from fastamp._util.tensors import on_device
from fastamp.distributed._reduction import ProcessGroup, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    Shards = DeviceMesh | Mapping[ProcessGroup | DeviceMesh, Iterable[Tensor] | None]


class ShardGroup(NamedTuple):
    """A group whose members hold shards of some parameters."""

    group: ProcessGroup
    members: frozenset[int] | None  # Identities of parameters; None: of all.
    named: bool = True  # By the caller. Else of a DTensor's mesh, and the same on all ranks.


def _is_mesh(value: Any) -> bool:
    # A torch without distributed has no such module.
    return torch.distributed.is_available() and isinstance(
        value, torch.distributed.device_mesh.DeviceMesh
    )


def _groups_of(function: str, mesh: Any) -> list[ProcessGroup]:
    if not _is_mesh(mesh):
        if mesh is not torch.distributed.GroupMember.NON_GROUP_MEMBER and not isinstance(
            mesh, ProcessGroup
        ):
            raise TypeError(
                f"{function}: expected groups as the keys of mesh, got {type(mesh).__name__}"
            )
        return [group_of(function, mesh)]
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{function}: expected a mesh that this process is a member of, got {mesh} on rank "
            f"{torch.distributed.get_rank()}"
        )
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _members(function: str, parameters: Any) -> frozenset[int] | None:
    if parameters is None:
        return None
    parameters = list(parameters)
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"{function}: expected the values of mesh to be lists of parameters or None, got "
                f"one with a {type(parameter).__name__}"
            )
    return frozenset(map(id, parameters))


def shard_groups(function: str, mesh: Any, norm_type: float) -> list[ShardGroup]:
    """Reads the argument ``mesh`` of a clip.

    Raises:
        TypeError: It is neither a mesh nor a mapping from groups or meshes to parameters.
        ValueError: A group or mesh lacks this process, or is named twice; or ``norm_type`` is not
            above 0, which sums over ranks need.
    """
    if not norm_type > 0:
        raise ValueError(f"{function}: expected norm_type > 0 with mesh, got {norm_type}")
    if isinstance(mesh, Mapping):
        entries = list(mesh.items())
    elif _is_mesh(mesh):
        entries = [(mesh, None)]
    else:
        advice = "; write {group: None}" if isinstance(mesh, ProcessGroup) else ""
        raise TypeError(
            f"{function}: expected mesh to be a DeviceMesh or a mapping from process groups to "
            f"parameters, got {type(mesh).__name__}{advice}"
        )
    groups = []
    for key, listed in entries:
        members = _members(function, listed)
        groups += [ShardGroup(group, members) for group in _groups_of(function, key)]
    names = [entry.group.group_name for entry in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{function}: expected each group once in mesh, got {name!r} {names.count(name)} "
                "times"
            )
    return groups


def _laid_out(parameter: Tensor) -> Any:
    """The DTensor that says how a parameter's gradient lies on its mesh; None if there is none.

    A rank without the gradient goes by the parameter. None too of sums that are still to be made.
    """
    laid_out = as_dtensor(parameter if parameter.grad is None else parameter.grad)
    if laid_out is None or any(placement.is_partial() for placement in laid_out.placements):
        return None
    return laid_out


def _refuse_own_mesh(function: str, parameter: Tensor, entry: ShardGroup) -> None:
    mesh = getattr(parameter.grad, "device_mesh", None)
    if mesh is None:
        return
    if entry.group.group_name in [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]:
        raise ValueError(
            f"{function}: expected groups in mesh over which no DTensor is laid out, got "
            f"{entry.group.group_name!r} of a gradient's own mesh, whose norm is over it already"
        )


def with_own_meshes(
    function: str, parameters: Sequence[Tensor], groups: list[ShardGroup]
) -> list[ShardGroup]:
    """Adds the groups of the meshes that DTensors among the parameters are laid out on.

    Raises:
        ValueError: A gradient is a DTensor over a group of which it is said to be a shard.
    """
    for entry in groups:
        for parameter in parameters:
            if entry.members is None or id(parameter) in entry.members:
                _refuse_own_mesh(function, parameter, entry)
    by_name = {entry.group.group_name: entry for entry in groups}
    for parameter in parameters:
        laid_out = _laid_out(parameter)
        if laid_out is None:
            continue
        # A gradient's mesh may be another object that is equal, with groups of its own; and ranks
        # without gradients have the parameter's alone.
        own = as_dtensor(parameter)
        mesh = (laid_out if own is None else own).device_mesh
        for dim, placement in enumerate(laid_out.placements):
            group = mesh.get_group(dim)
            entry = by_name.setdefault(
                group.group_name, ShardGroup(group, frozenset(), named=False)
            )
            if not placement.is_replicate() and entry.members is not None:
                members = entry.members | {id(parameter)}
                by_name[group.group_name] = entry._replace(members=members)
    return list(by_name.values())


def _local_norm(parameters: list[Tensor], norm_type: float) -> Tensor:
    """The norm of this rank's gradients, its shards of DTensors among them, in float64."""
    gradients = _C.gather_parameters(parameters)
    if norm_type == 2.0 and not gradients.foreign:
        norm = gradients.two_norm(torch.float64)
        if norm is not None:
            return norm
    foreign = {id(parameter) for parameter in gradients.foreign}
    local = [p.grad for p in parameters if id(p) not in foreign and p.grad is not None]
    others = []
    for parameter in distinct(gradients.foreign):
        laid_out = _laid_out(parameter)
        if laid_out is None:
            others.append(parameter)
        else:
            local.append(laid_out.to_local())
    norms = list(torch._foreach_norm(local, norm_type, dtype=torch.float64)) if local else []
    if others:
        norms.append(norm_with_subclasses([], others, norm_type).double())
    home = norms[0].device
    together = torch.stack([on_device(norm, home) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    return total


def _home(parameters: Sequence[Tensor], groups: list[ShardGroup]) -> torch.device:
    """Forms the sums over ranks: also a rank without gradients takes part."""
    for parameter in parameters:
        gradient: Any = parameter if parameter.grad is None else parameter.grad
        return torch.device(gradient.device)
    on_gpu = any(torch.distributed.get_backend(entry.group) == "nccl" for entry in groups)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@torch.no_grad()
def norm_over_ranks(
    parameters: Sequence[Tensor],
    groups: list[ShardGroup],
    norm_type: float,
    flag: Tensor | None = None,
) -> Tensor:
    """Returns the norm of gradients of which each rank has shards, the same on all of them.

    One all-reduce for each group, of 2 ** (groups - 1) numbers in float64 and one more for the
    flag, which every member has to reach, also one without gradients. No synchronisation.

    Args:
        parameters: Those without gradients are left out.
        groups: Over which groups which gradients are sharded, their own meshes included; over all
            others they are replicas.
        norm_type: Order of the norm, above 0; may be ``inf``.
        flag: A number that is made 1, in place, where it is not 0 on any rank of the groups.
    """
    if flag is None:  # Copies know the norm.
        groups = [entry for entry in groups if entry.named or entry.members]
    # For each set of groups, as a bit mask, the parameters that are sharded over exactly these.
    parts: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        mask = 0
        for bit, entry in enumerate(groups):
            if entry.members is None or id(parameter) in entry.members:
                mask |= 1 << bit
        parts.setdefault(mask, []).append(parameter)
    home = _home(parameters, groups)
    largest = math.isinf(norm_type)
    # Of all sets, whether this rank has such parameters or not: ranks agree on the size.
    sums = torch.zeros([2] * len(groups), dtype=torch.float64, device=home)
    for mask, members in parts.items():
        norm = on_device(_local_norm(members, norm_type), home)
        index = tuple(mask >> bit & 1 for bit in range(len(groups)))
        sums[index] = norm if largest else norm.pow(norm_type)
    if largest:
        sums.masked_fill_(sums.isnan(), math.inf)  # A maximum over ranks may lose NaN.
    raised = [] if flag is None else [on_device(flag != 0, home).double().reshape(1)]
    for dim, entry in enumerate(groups):
        over_group = sums.select(dim, 1)
        total = torch.cat([over_group.reshape(-1), *raised])
        all_reduce(total, largest, entry.group, "sum up a norm")
        over_group.copy_(total[: over_group.numel()].view_as(over_group))
        raised = [] if flag is None else [total[-1:]]
    if flag is not None:
        flag.copy_(raised[0][0] != 0)
    norm = sums.amax() if largest else sums.sum().pow(1.0 / norm_type)
    is_double = any(p.grad is not None and p.grad.dtype == torch.float64 for p in parameters)
    return norm if is_double else norm.float()
