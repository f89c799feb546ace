# SPDX-License-Identifier: Apache-2.0
"""Masters in two bytes: what a 16-bit parameter lacks of its float32 master."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fastamp._C as _C

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def of_shards(function: Callable[[Tensor, Tensor], Tensor], param: Any, other: Any) -> Any:
    """The function of a parameter and another tensor, of their local shards if it is a DTensor."""
    if not hasattr(param, "_local_tensor"):
        return function(param.detach(), other)
    local = function(param._local_tensor.detach(), other._local_tensor)
    return type(param).from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a parameter and its remainder, a DTensor of one."""
    master: Tensor = of_shards(_C.master_from_remainder, param, remainder)
    return master


def split(param: Tensor, master: Tensor) -> Tensor:
    """The remainder of a parameter's float32 master: 0 where that is not the master rounded."""
    remainder: Tensor = of_shards(_C.remainder_from_master, param, master)
    return remainder
