# SPDX-License-Identifier: Apache-2.0
"""Steps of other libraries' and torch's fused optimizers, as these expect them."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C

if TYPE_CHECKING:
    from torch import Tensor


#: Classes of torch that fastamp has a fused step for, as optim._fuse maps them to its own.
FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon)


def fuse_if_torchs(optimizer: Any) -> None:
    """Fuses an optimizer of torch's own that can be."""
    if type(optimizer) in FUSABLE:
        from fastamp.optim import fuse_

        fuse_(optimizer)


def takes_scaler(optimizer: Any) -> bool:
    """Whether ``step`` wants the scaler as an argument, which torch has deprecated; warns then."""
    if "grad_scaler" not in inspect.signature(optimizer.step).parameters:
        return False
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer: read the attributes `grad_scale` and `found_inf`, which it sets on the "
        "optimizer, instead of taking `grad_scaler` in step().",
        FutureWarning,
        stacklevel=4,
    )
    return True


def step_with_flags(
    optimizer: Any,
    scale: Tensor | None,
    flags: list[Tensor],
    unscaled: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Steps an optimizer that unscales and skips by itself.

    Args:
        optimizer: Reads its attributes ``grad_scale`` and ``found_inf``, which are set meanwhile.
        scale: The scale.
        flags: The non-finite flag of each device.
        unscaled: Whether its gradients are unscaled already.
        args: Passed on.
        kwargs: Passed on.

    Returns:
        What ``optimizer.step`` returned.

    Raises:
        AssertionError: There is no scale.
    """
    if scale is None:
        raise AssertionError("step: expected _get_scale_async() to return a tensor, got None")
    preset = getattr(optimizer, "grad_scale", None)
    if not unscaled:
        preset = scale * (1 if preset is None else preset)
    optimizer.grad_scale = preset
    # 0 or 1 and never a count: torch's fused kernels compare with 1.
    optimizer.found_inf = _C.flag_for_optimizer(flags, scale.device) if flags else 0
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
