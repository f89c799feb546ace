"""Clipping through a gradient scaler, folded into the step where the optimizer takes a gate."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

import fastamp._C as _C
from fastamp._clip import check_finite, clip_grad_norm_, two_norm
from fastamp._scaler_gated import check_once, folds, forget_if_scaled_anew, fuse_once
from fastamp._scaler_subclasses import distinct
from fastamp._scaler_unscale import UnscalingScaler

if TYPE_CHECKING:
    from torch import Tensor

    from fastamp._scaler_records import OptimizerRecord


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _torchs_norm(gradients: list[Any], norm_type: float) -> Tensor:
    """Torch's norm, of DTensors on several meshes and plain tensors together too."""
    groups: dict[Any, list[Any]] = {}
    for gradient in gradients:
        groups.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    total: Any = torch.nn.utils.get_total_norm
    norms: list[Any] = [total(group, norm_type) for group in groups.values()]
    # A DTensor's norm is spread over its mesh until it is asked for in full: a collective.
    whole: list[Tensor] = [
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms
    ]
    if len(whole) == 1:
        return whole[0]
    home = whole[0].device
    stacked = torch.stack([norm.to(home) for norm in whole])
    total_norm: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total_norm


def _norm(gradients: Any, record: OptimizerRecord, norm_type: float) -> Tensor:
    """Returns the norm of unscaled gradients, from unscale_'s pass if that still holds."""
    foreign = [parameter.grad for parameter in distinct(gradients.foreign)]
    dtype = gradients.norm_dtype or torch.float32
    known = record.gradient_pass
    if norm_type == 2.0 and not foreign:
        if known is not None and known.has_norm and known.holds(gradients):
            return known.total_norm(dtype)
        norm = two_norm(gradients, dtype)
        if norm is not None:
            return norm
    return _torchs_norm(gradients.tensors + foreign, norm_type)


@torch.no_grad()
def _scale_now(gradients: Any, coefficient: Tensor) -> None:
    gradients.multiply_(coefficient)
    for parameter in distinct(gradients.foreign):
        gradient: Any = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.mul_(coefficient.to(local.device, non_blocking=True))


class ClippingScaler(UnscalingScaler):
    """The part of ``fastamp.GradScaler`` that clips."""

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips the gradients of an optimizer by their norm after unscaling.

        Call it between ``backward`` and :meth:`step`, with or without :meth:`unscale_` before it.
        Optimizers of ``fastamp.optim`` apply the factor within :meth:`step`: until then the
        gradients are as they were, and edits of them meanwhile are clipped by the same factor. For
        others the gradients are unscaled, if they are not yet, and clipped at once. Either way the
        norm comes from the pass that checks the gradients. No synchronisation but for
        ``error_if_nonfinite`` and, in a program with DTensors, the mesh's collectives.

        Args:
            optimizer: Whose gradients are clipped; all of them together.
            max_norm: Largest norm that is left.
            norm_type: Order of the norm; may be ``inf``. Orders but 2 cost a pass of their own.
            error_if_nonfinite: Refuse a norm that is inf or NaN; waits for the device. An overflow
                of the loss scale is refused too: without it, such a step is skipped.

        Returns:
            The norm of the unscaled gradients before clipping: a scalar tensor, over all shards if
            gradients are DTensors. 0 if there are no gradients.

        Raises:
            AssertionError: :meth:`scale` was never called.
            RuntimeError: Called after :meth:`step`, or the norm is not finite, with
                ``error_if_nonfinite``; gradients are not clipped then.
        """
        if not self._enabled:
            parameters = _parameters_of(optimizer)
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        record, folded = self._begin_clipping("clip_grad_norm_", optimizer, self._fuse)
        if record.clip_coef is not None or record.clip_value is not None:
            self._clip_now(optimizer, record)
        max_norm, norm_type = float(max_norm), float(norm_type)
        checked = None
        if folded and norm_type == 2.0:
            checked = check_once(self, optimizer, record, max_norm)
        if checked is not None:
            norm = checked.total_norm(torch.float32)
            coefficient = checked.clip_coef
        else:
            if self._stage_of(optimizer) is OptState.READY:
                self.unscale_(optimizer)
            gradients = _C.gather_optimizer(optimizer, True)
            if not gradients.foreign and not gradients.tensors:
                return torch.tensor(0.0)
            norm = _norm(gradients, record, norm_type)
            coefficient = None
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        if coefficient is None:
            coefficient = _C.clip_coefficient(norm, max_norm)
        # A gradient of two parameters would be clipped twice by a step.
        if folded and (checked is not None or not (gradients.foreign or gradients.shared)):
            record.clip_coef = coefficient
        else:
            _scale_now(gradients, coefficient)
        if norm_type == 2.0:
            record.norm = norm
        return norm

    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Brings every element of an optimizer's gradients within [-clip_value, clip_value].

        When it happens and what it may follow is as for :meth:`clip_grad_norm_`; clipping by value
        comes after clipping by norm if both are asked for in that order. No synchronisation.

        Args:
            optimizer: Whose gradients are clipped.
            clip_value: Largest magnitude that is left.

        Raises:
            AssertionError: :meth:`scale` was never called.
            RuntimeError: Called after :meth:`step`.
        """
        clip_value = float(clip_value)
        if not self._enabled:
            torch.nn.utils.clip_grad_value_(_parameters_of(optimizer), clip_value)
            return
        record, folded = self._begin_clipping("clip_grad_value_", optimizer, False)
        if record.clip_value is not None:
            self._clip_now(optimizer, record)
        record.clip_value = clip_value
        if folded and record.gradient_pass is None and self._stage_of(optimizer) is OptState.READY:
            # The pass, which the step will use, tells whose gradients are to be clipped: others
            # that a later iteration makes, if this one is broken off, are not.
            folded = check_once(self, optimizer, record, None) is not None
        if not folded:
            self._clip_now(optimizer, record)

    def _begin_clipping(
        self, function: str, optimizer: Any, fuse: bool
    ) -> tuple[OptimizerRecord, bool]:
        self._check_scale_growth_tracker(function)
        stage = self._stage_of(optimizer)
        if stage is OptState.STEPPED:
            raise RuntimeError(
                f"{function}: expected a call before step(), got one after it: "
                f"{function}() is being called after step()."
            )
        if stage is OptState.UNSCALED:
            self._warn_if_scaled_anew(function, optimizer)
        if fuse:
            fuse_once(self, optimizer)
        record = self._notes.record_of(optimizer)
        if stage is OptState.READY:
            forget_if_scaled_anew(self, optimizer, record)
        return record, folds(self, optimizer)

    def _clip_now(self, optimizer: Any, record: OptimizerRecord) -> None:
        """Does what was put off to the step: unscales, clips by norm, clips by value."""
        if self._stage_of(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        if record.clip_coef is not None:
            _scale_now(_C.gather_optimizer(optimizer, False), record.clip_coef)
            record.clip_coef = None
        if record.clip_value is not None:
            torch.nn.utils.clip_grad_value_(_parameters_of(optimizer), record.clip_value)
            record.clip_value = None
