# SPDX-License-Identifier: Apache-2.0
"""Gradients that a program uses by itself, ahead of those of the step or beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from fastamp._scaler.subclasses import as_dtensor
from fastamp._util.tensors import on_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["unscaled", "zero_if"]


@torch.no_grad()
def zero_if(parameter: Any, flags: Iterable[Tensor]) -> None:
    """Sets a gradient that is a tensor subclass to 0 where a flag is raised."""
    laid_out = as_dtensor(parameter.grad)
    gradient = parameter.grad if laid_out is None else laid_out.to_local()
    for flag in flags:
        gradient.masked_fill_(on_device(flag, gradient.device).ne(0), 0.0)


def unscaled(tensors: Any, inverse: Tensor) -> Any:
    """Multiplies a tensor, or those of a list or tuple, by 1 / scale; None stays.

    Raises:
        TypeError: It is something else.
    """
    if tensors is None:
        return None
    if isinstance(tensors, torch.Tensor) and tensors.is_floating_point():
        wide = tensors if tensors.dtype is torch.float64 else tensors.float()
        return wide * on_device(inverse, wide.device)
    if isinstance(tensors, (list, tuple)):
        return type(tensors)([unscaled(each, inverse) for each in tensors])
    got = tensors.dtype if isinstance(tensors, torch.Tensor) else type(tensors).__name__
    raise TypeError(f"unscale: expected floating-point tensors in lists or tuples, got {got}")
