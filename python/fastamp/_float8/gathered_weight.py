# SPDX-License-Identifier: Apache-2.0
"""A weight that came to this rank in fp8."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["GatheredWeight"]

_SAME = (
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
)


class GatheredWeight(torch.Tensor):
    """The weight of a linear layer whose numbers are in fp8, under the dtype of its gradient.

    ``linear`` in a region with an fp8 recipe takes the fp8 numbers; all other ops get them
    dequantized. Made by ``fastamp.distributed.float8_all_gather`` for ``fully_shard``, which frees
    and fills the memory of ``rows``.

    Attributes:
        rows: [N, K] in fp8.
        inverse_scale: What they are multiplied by; float32, without dimensions.
    """

    rows: torch.Tensor
    inverse_scale: torch.Tensor

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __new__(cls, rows: torch.Tensor, inverse_scale: torch.Tensor, dtype: torch.dtype) -> Any:
        """A weight that looks as one of this dtype."""
        weight: Any = torch.Tensor._make_wrapper_subclass(
            cls, rows.shape, dtype=dtype, device=rows.device
        )
        weight.rows, weight.inverse_scale = rows, inverse_scale
        return weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Returns it without its numbers, which may have been freed."""
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    def dequantized(self) -> torch.Tensor:
        """The numbers that ops get that know nothing of fp8."""
        return (self.rows.float() * self.inverse_scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keeps the class for views of the whole weight, and else dequantizes."""
        del types
        if func in _SAME:
            weight = args[0]
            sizes = torch.Size(args[1]) if len(args) > 1 else weight.shape
            if sizes == weight.shape and (len(args) < 3 or tuple(args[2]) == weight.stride()):
                return cls(weight.rows, weight.inverse_scale, weight.dtype)
        if func._schema.is_mutable:
            raise TypeError(
                f"{func}: expected tensors that can be written, got a weight that was gathered in "
                "fp8: edit the sharded one, outside of forward and backward passes"
            )
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)
