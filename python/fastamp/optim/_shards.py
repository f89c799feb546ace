# SPDX-License-Identifier: Apache-2.0
"""Finds where the local shard of a DTensor lies in the whole tensor."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@functools.lru_cache(maxsize=65536)
def _first_element(
    mesh: Any,
    _place: tuple[int, ...],  # In the mesh, which ranks that are threads of one process share.
    placements: tuple[Any, ...],
    shape: tuple[int, ...],
) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    first = 0
    for offset, size in zip(offsets, shape, strict=False):  # No offsets: a rank outside the mesh.
        first = first * size + int(offset)
    return first


def first_element(param: Any) -> int:
    """The index of a shard's first element in the whole tensor, counted row by row.

    A shard of dim 0 is a run of elements from there on. Of other shards only the first element is
    known: for what may depend on how a tensor is sharded.

    Args:
        param: A ``DTensor``, whose mesh, placements and shape are looked at.
    """
    mesh = param.device_mesh
    place = tuple(mesh.get_coordinate() or ())
    return _first_element(mesh, place, tuple(param.placements), tuple(param.shape))


def gathered(param: Any, shard: Tensor) -> Tensor:
    """The whole tensor, made of the shards of all ranks; all ranks call this.

    Args:
        param: A ``DTensor`` whose mesh, placements and shape it has.
        shard: This rank's shard.
    """
    whole: Tensor = (
        type(param)
        .from_local(
            shard,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=_row_by_row(param.shape),
        )
        .full_tensor()
    )
    return whole


def local_part(param: Any, whole: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor that all ranks hold whole; communicates nothing.

    Args:
        param: A ``DTensor`` that is sharded so.
        whole: A tensor of its shape.
    """
    from torch.distributed.tensor import Replicate

    mesh = param.device_mesh
    everywhere = type(param).from_local(
        whole.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    part: Tensor = everywhere.redistribute(mesh, param.placements).to_local()
    return part


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)
