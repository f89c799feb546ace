# SPDX-License-Identifier: Apache-2.0
"""torch's own step for parameters that the fused step does not take, with the same AmpStep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fastamp._C import AmpStep


def _unhooked_step(torch_class: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    step: Any = torch_class.step
    while getattr(step, "hooked", False):  # Hooks have run already, around the whole step.
        step = step.__wrapped__
    function: Callable[..., Any] = step
    return function


def _unscale_and_clip(gradient: Tensor, amp_step: AmpStep) -> None:
    values = gradient._values() if gradient.is_sparse else gradient
    here = amp_step.for_device(values.device)
    for factor in (here.inv_scale, here.clip_coef):
        if factor is not None:
            values.mul_(factor)
    if here.clip_value is not None:
        values.clamp_(-here.clip_value, here.clip_value)


def apply_amp_step(params: list[Tensor], amp_step: AmpStep) -> bool:
    """Unscales and clips gradients in place.

    Returns:
        Whether the step is to happen; reading that waits for the device.
    """
    with torch.no_grad():
        # By gradient: parameters may share one.
        for gradient in {id(p.grad): p.grad for p in params if p.grad is not None}.values():
            _unscale_and_clip(gradient, amp_step)
    # sync: torch's step cannot be made to skip
    return amp_step.found_inf is None or amp_step.found_inf.item() == 0


def step_with_torch(
    optimizer: torch.optim.Optimizer,
    torch_class: type[torch.optim.Optimizer],
    foreign: list[tuple[int, Tensor]],
    amp_step: AmpStep | None,
) -> None:
    """Steps some parameters of an optimizer by torch's implementation.

    Args:
        optimizer: The optimizer that has their state and hyperparameters.
        torch_class: torch's class of the same algorithm.
        foreign: (index of group, parameter), with gradients.
        amp_step: What happens before the step, as for the other parameters.
    """
    params = list({id(param): param for _, param in foreign}.values())
    before = [param.grad for param in params]
    try:
        if amp_step is not None:
            if not amp_step.write_grads:
                for param in params:
                    param.grad = None if param.grad is None else param.grad.clone()
            if not apply_amp_step(params, amp_step):
                return
        groups = []
        for index in sorted({index for index, _ in foreign}):
            members = [param for i, param in foreign if i == index]
            groups.append({**optimizer.param_groups[index], "params": members})
        # An optimizer of these parameters alone, over the same state.
        stand_in = torch_class.__new__(torch_class)
        stand_in.defaults = optimizer.defaults
        stand_in.state = optimizer.state
        stand_in.param_groups = groups
        _unhooked_step(torch_class)(stand_in)
    finally:
        if amp_step is not None and not amp_step.write_grads:
            for param, gradient in zip(params, before, strict=True):
                param.grad = gradient
