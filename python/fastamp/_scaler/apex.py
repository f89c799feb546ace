# SPDX-License-Identifier: Apache-2.0
"""NVIDIA apex's way of writing loss scaling, on ``fastamp.GradScaler``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastamp._scaler.grad_scaler import GradScaler

__all__ = ["loss_scaler", "master_params", "scale_loss"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass
class _State:
    """State of an optimizer between its losses."""

    scalers: dict[int, GradScaler] = field(default_factory=dict)  # by loss_id
    scaled_by: GradScaler | None = None  # whose scale its gradients still carry (delay_unscale)
    is_open: bool = False
    skips_next: bool = False


_states: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()


def _state_of(optimizer: Any) -> _State:
    return _states.setdefault(optimizer, _State())


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yields every parameter of an optimizer, e.g. to clip gradients after :func:`scale_loss`."""
    for group in optimizer.param_groups:
        yield from group["params"]


def loss_scaler(optimizer: torch.optim.Optimizer, loss_id: int = 0) -> GradScaler:
    """Returns the scaler that :func:`scale_loss` uses, to read, save or set its scale.

    Args:
        optimizer: The optimizer, or the first of several.
        loss_id: As given to :func:`scale_loss`.

    Raises:
        KeyError: :func:`scale_loss` has not been used with them.
    """
    state = _states.get(optimizer)
    if state is None or loss_id not in state.scalers:
        raise KeyError(
            "loss_scaler: expected an optimizer and a loss_id that scale_loss was used with, "
            f"got {type(optimizer).__name__} and {loss_id}"
        )
    return state.scalers[loss_id]


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_id: int = 0,
    model: Any = None,  # noqa: ARG001  (apex has it and does not use it)
    delay_unscale: bool = False,
) -> Iterator[torch.Tensor]:
    """Scales a loss for its backward pass, as apex's ``amp.scale_loss``.

    ``with scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``, then
    ``optimizer.step()``. The end of the block unscales the gradients, adds them to those that were
    there, and updates the scale; after an overflow the next ``step()`` of each of the optimizers
    does nothing. Waits for the device once per block. Not thread-safe.

    Args:
        loss: The loss; float16 and bfloat16 are scaled in float32.
        optimizers: The optimizer, or several, whose parameters the backward pass reaches.
        loss_id: Losses of different ids have scales of their own.
        model: Not used.
        delay_unscale: Leaves the gradients scaled, for all but the last of several backward passes
            of one loss that add up.

    Yields:
        The scaled loss.

    Raises:
        TypeError: ``optimizers`` is neither an optimizer nor a list of at least one.
        RuntimeError: An optimizer is in such a block already, or has gradients that another loss
            left scaled.
        ValueError: A gradient is float16.
    """
    listed = _as_list(optimizers)
    scalers = _state_of(listed[0]).scalers
    scaler = scalers.get(loss_id) or scalers.setdefault(loss_id, GradScaler(loss.device.type))
    states = [_state_of(optimizer) for optimizer in listed]
    _check_free(states, scaler)
    kept = [
        (parameter, parameter.grad)
        for optimizer, state in zip(listed, states, strict=True)
        if state.scaled_by is None
        for parameter in master_params(optimizer)
    ]
    for parameter, _ in kept:
        parameter.grad = None
    for state in states:
        state.is_open = True
    try:
        yield scaler.scale(loss.float() if loss.dtype in _HALF else loss)
        if delay_unscale:
            _add_back(kept, scaler)
        else:
            overflowed = _unscale(scaler, listed)
            _add_back(kept)
            for optimizer in listed if overflowed else ():
                _skip_next_step(optimizer)
        for state in states:
            state.scaled_by = scaler if delay_unscale else None
    except BaseException:
        for parameter, grad in kept:
            parameter.grad = grad
        raise
    finally:
        for state in states:
            state.is_open = False


def _as_list(optimizers: Any) -> list[Any]:
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not listed or not all(hasattr(each, "param_groups") for each in listed):
        names = ", ".join(type(each).__name__ for each in listed) or "an empty list"
        raise TypeError(f"scale_loss: expected an optimizer or a list of them, got {names}")
    return listed


def _check_free(states: list[_State], scaler: GradScaler) -> None:
    if any(state.is_open for state in states):
        raise RuntimeError(
            "scale_loss: expected optimizers outside other scale_loss blocks, got one inside"
        )
    if any(state.scaled_by not in (None, scaler) for state in states):
        raise RuntimeError(
            "scale_loss: expected no gradients that another loss left scaled (delay_unscale), "
            "got some: end that loss's backward passes without delay_unscale first"
        )


def _add_back(kept: list[tuple[Any, Any]], scaler: GradScaler | None = None) -> None:
    """Adds the new gradients to those that were there, which take the new ones' scale."""
    for parameter, grad in kept:
        if grad is None:
            continue
        if scaler is not None and scaler.is_enabled():
            grad.mul_(scaler.scale(torch.ones((), device=grad.device)))
        if parameter.grad is not None:
            grad += parameter.grad
        parameter.grad = grad


def _unscale(scaler: GradScaler, optimizers: list[Any]) -> bool:
    """Unscales the gradients and moves the scale; returns whether any was not finite."""
    if not scaler.is_enabled():
        return False
    reached = [
        optimizer
        for optimizer in optimizers
        if any(parameter.grad is not None for parameter in master_params(optimizer))
    ]
    if not reached:
        return False
    for optimizer in reached:
        scaler.unscale_(optimizer)
    scaler.update()
    return scaler.step_was_skipped  # waits for the device: the next step is a skip or it is not


def _skip_next_step(optimizer: Any) -> None:
    """Makes the next call of ``optimizer.step`` do nothing."""
    state = _state_of(optimizer)
    if state.skips_next:
        return
    state.skips_next = True
    of_instance = optimizer.__dict__.get("step")
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not state.skips_next:  # the caller has kept this function
            return original(*args, **kwargs)
        state.skips_next = False
        if optimizer.__dict__.get("step") is step:
            del optimizer.step
            if of_instance is not None:
                optimizer.step = of_instance
        return None

    optimizer.step = step
