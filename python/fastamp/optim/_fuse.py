# SPDX-License-Identifier: Apache-2.0
"""Gives an optimizer that exists already the fused step."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from fastamp.optim._fused import FusedOptimizer
from fastamp.optim._layout import with_dtypes
from fastamp.optim._low_precision_weights import check_grad_dtype_exists
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


def fuse_(
    optimizer: _Optimizer,
    *,
    autocast_dtype: torch.dtype | None = None,
    widen_grads: bool | None = None,
) -> _Optimizer:
    """Makes a torch optimizer step as fastamp's of the same name does, from now on.

    The object stays itself: param groups, hooks, and LR schedulers that were or will be made for it
    go on working. It becomes an instance of the class in ``fastamp.optim``, and its state takes
    that class's layout, which ``torch.optim`` loads.

    Args:
        optimizer: An object of exactly ``torch.optim.SGD``, ``Adam``, ``AdamW`` or ``Muon``, or one
            that is fused already.
        autocast_dtype: As for ``fastamp.optim.SGD``. ``None`` leaves it as it is.
        widen_grads: ``GradScaler.unscale_`` puts float32 gradients in the place of fp16 ones, which
            torch refuses there, so that loops of others which unscale and clip can train fp16
            parameters: their masters are float32. Costs 4 bytes for each such element from then
            until the gradients are set to ``None``. Not part of copies and pickles. ``None`` leaves
            it as it is; by default fp16 gradients are refused.

    Returns:
        The same object.

    Raises:
        ValueError: ``autocast_dtype`` is not one that weight copies can have, or a group has a
            value of an option that the fused step does not know. Nothing was changed.
        TypeError: The optimizer is of another class, subclasses of these included: the fused step
            would replace what they do; or ``widen_grads`` is no bool. Nothing was changed.
        NotImplementedError: ``widen_grads`` with a torch without ``Tensor.grad_dtype``.
    """
    check_autocast_dtype("fuse_", autocast_dtype)
    if widen_grads is not None and not isinstance(widen_grads, bool):
        raise TypeError(
            f"fuse_: expected widen_grads to be a bool or None, got {type(widen_grads).__name__}"
        )
    if widen_grads:
        check_grad_dtype_exists("fuse_")
    _fuse(optimizer, autocast_dtype)
    if widen_grads is not None:
        vars(optimizer)["_fastamp_widens_grads"] = widen_grads
    return optimizer


def _fuse(optimizer: torch.optim.Optimizer, autocast_dtype: torch.dtype | None) -> None:
    if isinstance(optimizer, FusedOptimizer):
        if autocast_dtype is not None:
            optimizer._fastamp_use_weight_copies("fuse_", autocast_dtype)
        return
    fused = _FUSED.get(type(optimizer))
    if fused is None:
        raise TypeError(
            "fuse_: expected an object of exactly torch.optim.SGD, Adam, AdamW or Muon, "
            f"got {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    groups = [with_dtypes(group) for group in optimizer.param_groups]
    for group in groups:
        fused._fastamp_check_stored("fuse_", group)
    erased: Any = optimizer
    erased.__class__ = fused
    erased.__dict__.pop("_step_supports_amp_scaling", None)
    erased._patch_step_function()
    for group, changed in zip(optimizer.param_groups, groups, strict=True):
        group.update(changed)
    erased._fastamp_adopt_state({})
    erased._fastamp_use_weight_copies("fuse_", autocast_dtype)
