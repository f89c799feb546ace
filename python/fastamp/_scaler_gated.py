"""Steps of optimizers that take a gate: the skip is decided on the device, nothing waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

import fastamp._C as _C
from fastamp._gate import StepGate
from fastamp._scaler_steps import agree_on_flags

if TYPE_CHECKING:
    from fastamp._scaler_records import OptimizerRecord
    from fastamp._scaler_unscale import UnscalingScaler

_known_overrides: dict[tuple[type, tuple[str, ...]], bool] = {}


def _overrides(scaler: UnscalingScaler, *methods: str) -> bool:
    kind = type(scaler)
    answer = _known_overrides.get((kind, methods))
    if answer is None:
        from fastamp.grad_scaler import GradScaler

        answer = any(getattr(kind, name) is not getattr(GradScaler, name) for name in methods)
        _known_overrides[kind, methods] = answer
    return answer


def _step_is_watched(optimizer: Any) -> bool:
    # Accelerate replaces optimizer.step to learn from the call that a step was not skipped: then
    # the call itself is the message. LR schedulers replace it too, but only count.
    replaced = vars(optimizer).get("step")
    return replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched")


def goes_through_gate(scaler: UnscalingScaler, optimizer: Any, args: tuple[Any, ...]) -> bool:
    """Whether this step goes through a gate; a closure given by position is torch's business."""
    return folds(scaler, optimizer) and not any(argument is not None for argument in args)


def fuse_once(scaler: UnscalingScaler, optimizer: Any) -> None:
    """Fuses an optimizer of torch's that is met for the first time."""
    record = scaler._notes.record_of(optimizer)
    if not record.fuse_tried:
        record.fuse_tried = True
        from fastamp.optim import fuse_

        if type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            fuse_(optimizer)


def folds(scaler: UnscalingScaler, optimizer: Any) -> bool:
    """Whether a step of this optimizer will go through a gate."""
    return (
        getattr(optimizer, "_fastamp_takes_gate", False) is True
        and not _overrides(scaler, "_maybe_opt_step", "step")
        and not _step_is_watched(optimizer)
    )


def check_once(
    scaler: UnscalingScaler, optimizer: Any, record: OptimizerRecord, max_norm: float | None
) -> _C.PassResult | None:
    """Checks scaled gradients without writing them, unless that was done and still holds.

    Returns:
        The pass; ``None`` if the gradients are, or now have to be, unscaled in place.
    """
    if scaler._stage_of(optimizer) is not OptState.READY:
        return None
    if _overrides(scaler, "unscale_", "_unscale_grads_"):
        return None
    scale, _ = scaler._check_scale_growth_tracker("step")
    inv_scale, found_inf = scaler._begin_unscale(scale)
    checked = _C.check_gradients(optimizer, inv_scale, found_inf, record.memory, max_norm)
    if checked is None:
        return None
    flags = checked.flags
    if scaler.process_group is not None:
        agree_on_flags(flags, found_inf.device, scaler._device, scaler.process_group)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
    record.gradient_pass = checked
    record.inv_scale = inv_scale
    record.mark = scaler._current_mark()
    return checked


def forget_if_scaled_anew(scaler: UnscalingScaler, optimizer: Any, record: OptimizerRecord) -> None:
    """Drops what was put off to the step for gradients that are gone: the iteration was broken off.

    Only for an optimizer that is not unscaled yet.
    """
    if record.scaled_anew(optimizer, scaler._current_mark()):
        record.start_iteration()


def step_through_gate(
    scaler: UnscalingScaler, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Steps an optimizer that takes a gate; its ``step`` is called whatever the gradients are."""
    record = scaler._notes.record_of(optimizer)
    fresh = scaler._stage_of(optimizer) is OptState.READY
    inv_scale = None
    if fresh:
        if record.mark is not None:
            forget_if_scaled_anew(scaler, optimizer, record)
        checked = record.gradient_pass if record.inv_scale is not None else None
        if checked is None or not checked.holds(_C.gather_optimizer(optimizer, False)):
            checked = check_once(scaler, optimizer, record, None)
        if checked is None:
            scaler.unscale_(optimizer)
        else:
            inv_scale = record.inv_scale
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = list(state["found_inf_per_device"].values())
    if not flags:
        if fresh:  # A refused call leaves no trace.
            del scaler._per_optimizer_states[id(optimizer)]
        raise AssertionError(
            "step: expected an optimizer with at least one gradient, got none: "
            "No inf checks were recorded for this optimizer."
        )
    found_inf = _C.combine_flags(flags, flags[0].device)
    keep = scaler._keep_scaled_grads
    optimizer._fastamp_gate = StepGate(
        inv_scale, record.clip_coef, found_inf, record.clip_value, not keep
    )
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        vars(optimizer).pop("_fastamp_gate", None)
    state["stage"] = OptState.STEPPED
    if record.gradient_pass is not None:
        record.gradient_pass.forget()
    return result
