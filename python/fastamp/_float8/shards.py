# SPDX-License-Identifier: Apache-2.0
"""Linear layers in fp8 whose tensors are spread over ranks: DTensors, and weights gathered in fp8.

``linear`` of native code asks here. Each rank multiplies its parts by the casts that the whole
tensors would have: scales come from the largest magnitude on any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastamp._C as _C
from fastamp._float8.gathered_weight import GatheredWeight
from fastamp._float8.recipe import recipe_numbered

__all__ = ["agree_on_largest"]


def _class_is(tensor: Tensor, name: str) -> bool:
    """Whether a tensor is of a class of torch's, which is not imported if nobody else has."""
    return type(tensor).__name__ == name and type(tensor).__module__.startswith("torch.")


def _is_part(weight: Tensor) -> bool:
    return isinstance(weight, GatheredWeight) or _class_is(weight, "DTensor")


def agree_on_largest(mesh: Any, wanted: list[tuple[Tensor, tuple[int, ...]]]) -> None:
    """Replaces each tensor by its largest value over some dimensions of a mesh, in place.

    One all-reduce for each dimension in which any of the tensors is spread. Each is float32; all
    ranks of the mesh make the call.
    """
    for dim in range(mesh.ndim):
        values = [value for value, dims in wanted if dim in dims]
        if not values or mesh.size(dim) == 1:
            continue
        both = torch.cat([value.reshape(-1) for value in values])
        torch.distributed.all_reduce(
            both, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim)
        )
        largest = torch.split(both, [value.numel() for value in values])
        for value, found in zip(values, largest, strict=True):
            value.copy_(found.view(value.shape))


class _Spread(NamedTuple):
    """How operands, result and gradients lie in one dimension of a mesh."""

    y: Any
    x_grad: Any
    weight_grad: Any
    bias: Any
    bias_grad: Any


def _spread(x: Any, weight: Any, last: int) -> _Spread | None:
    """Returns how x and a weight lie; ``None`` where no product of parts is a part of the product.

    ``last`` is the dimension of x that is summed over.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    is_whole = type(weight) is Replicate
    if type(x) is Replicate:
        if type(weight) is Shard and weight.dim == 0:
            return _Spread(Shard(last), Partial(), weight, weight, weight)
        return _Spread(x, x, weight, x, x) if is_whole else None
    if type(x) is not Shard:
        return None
    if x.dim == last:
        is_summed = type(weight) is Shard and weight.dim == 1
        return _Spread(Partial(), x, weight, Replicate(), Replicate()) if is_summed else None
    return _Spread(x, x, Partial(), weight, Partial()) if is_whole else None


def _shards(tensor: Any) -> tuple[int, ...]:
    """The dimensions of the mesh in which a tensor is sharded."""
    return tuple(i for i, each in enumerate(tensor.placements) if each.is_shard())


def _is_even(tensor: Any) -> bool:
    """Whether all ranks have parts of one size, of which products in fp8 exist."""
    sizes, local = list(tensor.shape), tensor._local_tensor
    for dim in _shards(tensor):
        sizes[tensor.placements[dim].dim] /= tensor.device_mesh.size(dim)
    return tuple(sizes) == tuple(local.shape)


def _is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _waited(tensor: Any) -> Any:
    """A DTensor, whose part is there and no promise."""
    if _class_is(tensor._local_tensor, "AsyncCollectiveTensor"):
        tensor._local_tensor = tensor._local_tensor.wait()
    return tensor


def _cast_of(weight: Tensor, number: int) -> tuple[Tensor, Tensor] | None:
    """The cast of a weight that came in fp8."""
    if not isinstance(weight, GatheredWeight):
        return None
    wanted = recipe_numbered(number).forward_dtype
    if weight.rows.dtype != wanted:
        raise ValueError(
            f"linear: expected the region's recipe to have forward_dtype {weight.rows.dtype}, in "
            f"which distributed.float8_all_gather has sent the weight, got {wanted}"
        )
    return weight.rows, weight.inverse_scale


def _linear(number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``linear`` in fp8; ``None`` if it has to run in the base dtype, on all ranks alike."""
    if isinstance(weight, GatheredWeight):
        if not _is_ordinary(x) or not (bias is None or _is_ordinary(bias)):
            return None
        cast = _cast_of(weight, number)
        return _C.float8_linear_of_parts(number, x, weight, bias, None, None, cast, True, None)
    operands: list[Any] = [x, weight] if bias is None else [x, weight, bias]
    if any(
        not _class_is(each, "DTensor") or each.device_mesh != operands[1].device_mesh
        for each in operands
    ):
        return None
    return _linear_of_dtensors(number, *map(_waited, operands))


def _linear_of_dtensors(number: int, x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    from torch.distributed.tensor import DTensor

    last = x.ndim - 1
    placements = zip(x.placements, weight.placements, strict=True)
    found = [_spread(of_x, of_weight, last) for of_x, of_weight in placements]
    spreads = [each for each in found if each is not None]
    if len(spreads) != len(x.placements) or not (_is_even(x) and _is_even(weight)):
        return None
    if bias is not None and list(bias.placements) != [each.bias for each in spreads]:
        return None
    if any(size % 16 for size in weight._local_tensor.shape):
        return None
    parts = [x._local_tensor, weight._local_tensor, *([] if bias is None else [bias._local_tensor])]
    if not all(_is_ordinary(each) or isinstance(each, GatheredWeight) for each in parts):
        return None
    mesh, cast = x.device_mesh, _cast_of(weight._local_tensor, number)
    in_x, in_weight = _shards(x), () if cast is not None else _shards(weight)
    x_amax = _C.float8_amax(x._local_tensor.detach()) if in_x else None
    weight_amax = _C.float8_amax(weight._local_tensor.detach()) if in_weight else None
    pairs = ((x_amax, in_x), (weight_amax, in_weight))
    agree_on_largest(mesh, [(amax, dims) for amax, dims in pairs if amax is not None])
    summed = [dim for dim, each in enumerate(spreads) if each.y.is_partial()]
    y = _C.float8_linear_of_parts(
        number,
        x.to_local(grad_placements=[each.x_grad for each in spreads]),
        weight.to_local(grad_placements=[each.weight_grad for each in spreads]),
        None if bias is None else bias.to_local(grad_placements=[e.bias_grad for e in spreads]),
        x_amax,
        weight_amax,
        cast,
        all(mesh.get_local_rank(dim) == 0 for dim in summed),
        _agreement(mesh, tuple(dim for dim, each in enumerate(spreads) if each.y.is_shard())),
    )
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    of_y = [each.y for each in spreads]
    whole: Tensor = DTensor.from_local(y, mesh, of_y, run_check=False, shape=shape, stride=stride)
    return whole


def _agreement(mesh: Any, dims: tuple[int, ...]) -> Callable[[Tensor], None] | None:
    """Returns what backward calls with the largest magnitude of this rank's gradient."""
    if not dims:
        return None
    return lambda amax: agree_on_largest(mesh, [(amax, dims)])


_C.set_float8_linear_of_parts(_is_part, _linear)
