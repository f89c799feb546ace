# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits between steps: which parameters have them, and changes of layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C

if TYPE_CHECKING:
    from torch import Tensor

#: What ``state_dtype`` says of groups whose moments are codes.
EIGHT_BITS = "8bit"
#: uint8, of the parameter's shape, and two scales for each group of a row. Not under the names of
#: moments: torch's optimizers would take codes for numbers; so they raise KeyError.
CODES = ("exp_avg_8", "exp_avg_sq_8", "moment_scales_8")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def moment_dtype(group: dict[str, Any]) -> torch.dtype:
    """The dtype of the moments of a group's parameters, but for those that are codes."""
    dtype: torch.dtype | str | None = group.get("state_dtype")
    if isinstance(dtype, str):
        return torch.bfloat16
    return torch.float32 if dtype is None else dtype


def group_of_codes(param: Tensor, group: dict[str, Any]) -> int:
    """Returns how many elements share a scale in a parameter's moments; 0 if they are no codes."""
    if group.get("state_dtype") != EIGHT_BITS or group["amsgrad"]:
        return 0
    # The whole shape decides, so that all ranks decide the same. Shards of other dimensions than
    # the first would cut groups.
    if _local(param).shape[1:] != param.shape[1:]:
        return 0
    return _C.moment_group(param.shape)


def change_moments(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    """Turns moments into codes or back where a state has the others, and makes missing codes."""
    size = group_of_codes(param, group)
    has_codes = CODES[0] in state
    if has_codes and size == 0:
        moments = decoded(param, state)
        for key in CODES:
            del state[key]
        dtype = moment_dtype(group)
        state.update({key: value.to(dtype) for key, value in moments.items()})
    elif size != 0 and not has_codes:
        state.update(_encoded(param, size, state))
        for key in (*_MOMENTS, "max_exp_avg_sq"):
            state.pop(key, None)


def decoded(param: Any, state: dict[Any, Any]) -> dict[str, Tensor]:
    """The float32 moments that the codes of a state stand for.

    Args:
        param: The parameter, or whatever has its sharding.
        state: A state with codes.
    """
    moments = _C.decode_moments(*(_local(state[key]) for key in CODES))
    return {
        key: _like(param, value, param.shape) for key, value in zip(_MOMENTS, moments, strict=True)
    }


def _encoded(param: Tensor, size: int, state: dict[Any, Any]) -> dict[str, Tensor]:
    local = _local(param)
    first, second = (
        _local(state[key]).float() if key in state else torch.zeros_like(local, dtype=torch.float32)
        for key in _MOMENTS
    )
    codes = _C.encode_moments(first, second, size)
    row = param.shape[1:].numel()
    shapes = [param.shape, param.shape, torch.Size([param.shape[0], row // size, 2])]
    return {
        key: _like(param, value, shape)
        for key, value, shape in zip(CODES, codes, shapes, strict=True)
    }


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local.detach()


def _like(param: Any, local: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of this shape, sharded as the parameter, of which this is the local part."""
    if not hasattr(param, "_local_tensor"):
        return local
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = type(param).from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )
    return whole
