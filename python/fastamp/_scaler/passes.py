# SPDX-License-Identifier: Apache-2.0
"""Passes over a loss whose gradients the program uses by itself, ahead of those of the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp._scaler.subclasses import as_dtensor
from fastamp._util.tensors import on_device

if TYPE_CHECKING:
    from torch import Tensor

    from fastamp._scaler.state import ScalerState

__all__ = ["ScaledPass", "unscaled"]


class ScaledPass:
    """Result of :meth:`fastamp.GradScaler.pass_`: its block makes gradients of a scaled loss."""

    def __init__(self, scaler: ScalerState, optimizer: torch.optim.Optimizer) -> None:
        """Begins nothing yet."""
        self._scaler, self._optimizer = scaler, optimizer
        self._times_scaled: int | None = None

    def __enter__(self) -> None:
        """Refuses an optimizer that is unscaled, stepped, or in another pass already."""
        scaler = self._scaler
        if not scaler.is_enabled():
            return
        _C.check_order("pass_", scaler._stage_of(self._optimizer).value)
        if id(self._optimizer) in scaler._open_passes:
            raise RuntimeError("pass_: expected an optimizer without an open pass, got one in one")
        scaler._open_passes = scaler._open_passes | {id(self._optimizer)}
        self._times_scaled = getattr(scaler, "_times_scaled", 0)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Unscales the gradients; after an exception only the pass is over."""
        scaler, optimizer = self._scaler, self._optimizer
        before, self._times_scaled = self._times_scaled, None
        if before is None:
            return
        scaler._open_passes = scaler._open_passes - {id(optimizer)}
        if not scaler._open_passes:
            del scaler._open_passes
        if kind is not None:
            return
        if getattr(scaler, "_times_scaled", 0) == before:
            raise RuntimeError(
                "pass_: expected a block that gives its loss to scale(), got one that does not"
            )
        _C.check_order("pass_", scaler._stage_of(optimizer).value)
        scaler.unscale_(optimizer)
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not flags:
            del scaler._per_optimizer_states[id(optimizer)]
            raise RuntimeError("pass_: expected an optimizer with at least one gradient, got none")
        for parameter in scaler._core.end_pass(scaler, optimizer):
            _zero_if(parameter, flags.values())


@torch.no_grad()
def _zero_if(parameter: Any, flags: Iterable[Tensor]) -> None:
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
