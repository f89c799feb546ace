# SPDX-License-Identifier: Apache-2.0
"""Gives an optimizer that exists already the fused step."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from fastamp.optim._fused import FusedOptimizer
from fastamp.optim._weight_copies import check_autocast_dtype
from fastamp.optim.adam import Adam
from fastamp.optim.adamw import AdamW
from fastamp.optim.muon import Muon
from fastamp.optim.sgd import SGD

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

_FUSED: dict[type, type[FusedOptimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.Muon: Muon,
}


def fuse_(optimizer: _Optimizer, *, autocast_dtype: torch.dtype | None = None) -> _Optimizer:
    """Makes a torch optimizer step as fastamp's of the same name does, from now on.

    The object stays itself: param groups, hooks, and LR schedulers that were or will be made for it
    go on working. It becomes an instance of the class in ``fastamp.optim``, and its state takes
    that class's layout, which ``torch.optim`` loads.

    Args:
        optimizer: An object of exactly ``torch.optim.SGD``, ``Adam``, ``AdamW`` or ``Muon``, or one
            that is fused already.
        autocast_dtype: As for ``fastamp.optim.SGD``. ``None`` leaves it as it is.

    Returns:
        The same object.

    Raises:
        ValueError: ``autocast_dtype`` is not one that weight copies can have, or a group has a
            value of an option that the fused step does not know. Nothing was changed.
        TypeError: The optimizer is of another class, subclasses of these included: the fused step
            would replace what they do. Nothing was changed.
    """
    check_autocast_dtype("fuse_", autocast_dtype)
    if isinstance(optimizer, FusedOptimizer):
        if autocast_dtype is not None:
            optimizer._fastamp_use_weight_copies("fuse_", autocast_dtype)
        return optimizer
    fused = _FUSED.get(type(optimizer))
    if fused is None:
        raise TypeError(
            "fuse_: expected an object of exactly torch.optim.SGD, Adam, AdamW or Muon, "
            f"got {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    for group in optimizer.param_groups:
        fused._fastamp_check_stored("fuse_", group)
    erased: Any = optimizer
    erased.__class__ = fused
    erased.__dict__.pop("_step_supports_amp_scaling", None)
    erased._patch_step_function()
    erased._fastamp_adopt_state({})
    erased._fastamp_use_weight_copies("fuse_", autocast_dtype)
    return optimizer
