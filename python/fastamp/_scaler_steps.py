"""The less travelled parts of a scaler's iteration: fused optimizers, ranks, a user's own scale."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

import fastamp._C as _C
from fastamp._scaler_checks import check_bound
from fastamp._scaler_history import columns

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastamp.grad_scaler import GradScaler


def scale_each(scaler: GradScaler, outputs: Any, replicas: dict[torch.device, Tensor]) -> Any:
    """Scales the tensors of a nest of iterables; the scale goes to each device once."""
    if isinstance(outputs, torch.Tensor):
        device = outputs.device
        if device not in replicas:
            replicas[device] = scaler._scale_on(device)
        return outputs * replicas[device]
    if not isinstance(outputs, Iterable):
        raise ValueError(
            "scale: outputs must be a Tensor or an iterable of Tensors, "
            f"got {type(outputs).__name__}"
        )
    scaled = (scale_each(scaler, output, replicas) for output in outputs)
    return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled


def agree_on_flags(
    flags: dict[torch.device, Tensor], home: torch.device, device_type: str, group: ProcessGroup
) -> None:
    """Raises every flag, on every rank of the group, if any rank has raised one.

    Always exactly one collective, whatever gradients a rank holds, so that ranks cannot wait for
    each other; a rank without gradients gets a flag where the scale lives.

    Args:
        flags: The non-finite flag of each device, fp32 scalars; written in place.
        home: The device of the scale.
        device_type: The scaler's kind of device; the collective runs there.
        group: The group to agree over.
    """
    if not flags:
        flags[home] = torch.zeros((), dtype=torch.float32, device=home)
    # Gradients offloaded to the host still have to be agreed on by the device's backend.
    offloaded = home.type == "cpu" and device_type != "cpu"
    device = torch.device(device_type) if offloaded else home
    combined = _C.combine_flags(list(flags.values()), device)
    torch.distributed.all_reduce(combined, torch.distributed.ReduceOp.MAX, group=group)
    for flag in flags.values():
        if flag is not combined:
            flag.copy_(combined, non_blocking=True)


def step_with_flags(
    scaler: GradScaler,
    optimizer: Any,
    stage: OptState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Steps an optimizer that skips by itself, by torch's protocol."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer: read the attributes `grad_scale` and `found_inf`, which it sets on the "
            "optimizer, instead of taking `grad_scaler` in step().",
            FutureWarning,
            stacklevel=3,
        )
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
        state["stage"] = OptState.STEPPED
        return result
    if stage is OptState.READY:
        scaler._check_inf_per_device(optimizer)
    scale = scaler._get_scale_async()
    if scale is None:
        raise AssertionError("step: expected _get_scale_async() to return a tensor, got None")
    flags = list(state["found_inf_per_device"].values())
    preset = getattr(optimizer, "grad_scale", None)
    if stage is not OptState.UNSCALED:
        preset = scale * (1 if preset is None else preset)
    optimizer.grad_scale = preset
    # 0 or 1 and never a count: torch's fused kernels compare with 1.
    optimizer.found_inf = _C.flag_for_optimizer(flags, scale.device) if flags else 0
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
    state["stage"] = OptState.STEPPED
    return result


def checked_scale(scaler: GradScaler, scale: Tensor, new_scale: float | Tensor) -> Tensor:
    """Returns a user's scale as a tensor like ``scale``, or refuses it as torch does."""
    if isinstance(new_scale, float):
        check_bound("update", "new_scale", new_scale, scaler._min_scale, scaler._max_scale)
        return torch.full_like(scale, new_scale)
    if not isinstance(new_scale, torch.Tensor):
        raise AttributeError(
            f"update: new_scale should be a float or a Tensor, got {type(new_scale).__name__}"
        )
    for accepted, got in (
        (new_scale.device.type == scaler._device, f"a tensor on {new_scale.device}"),
        (new_scale.numel() == 1, f"a tensor of shape {tuple(new_scale.shape)}"),
        (not new_scale.requires_grad, "a tensor with requires_grad=True"),
    ):
        if not accepted:
            raise AssertionError(
                "update: new_scale should be a float or a 1-element tensor on a "
                f"{scaler._device} device with requires_grad=False, got {got}"
            )
    return torch.empty_like(scale).copy_(new_scale)


def _rules(
    scaler: GradScaler,
) -> tuple[float, float, int, Tensor | None, int, float | None, float | None]:
    """Returns what says how a scale moves, in the order in which C++ takes it."""
    return (
        scaler._growth_factor,
        scaler._backoff_factor,
        scaler._growth_interval,
        scaler._hysteresis_tracker,
        scaler._hysteresis,
        scaler._min_scale,
        scaler._max_scale,
    )


def update_on_host(scaler: GradScaler) -> bool:
    """Ends the commonest iteration, of one optimizer on the CPU, in one call of C++.

    Returns:
        Whether it did; if not, nothing has happened and the general way has to be gone.
    """
    scale, growth_tracker = scaler._scale, scaler._growth_tracker
    states, notes = scaler._per_optimizer_states, scaler._notes
    if len(states) != 1 or notes.pending or scale is None or notes.prepared_for is not scale:
        return False
    ((key, state),) = states.items()
    record = notes.records.get(key)
    if growth_tracker is None or record is None or not record.norm_is_that_of_its_pass():
        return False
    outcome = _C.update_on_host(
        scale,
        growth_tracker,
        state["found_inf_per_device"],
        *_rules(scaler),
        record.memory,
        *columns(notes.ring),
    )
    if outcome is None:
        return False
    notes.take_in_now(record, *outcome)
    return True


def move_scale(
    scaler: GradScaler,
    scale: Tensor,
    growth_tracker: Tensor,
    flags: list[Tensor],
    new_scale: Tensor | None,
) -> None:
    """Moves the scale by an iteration's flags, or to ``new_scale``; notes it on the device."""
    notes = scaler._notes
    if notes.prepared_for is not scale:
        notes.prepare(scale, scaler._history_size)
    ring = notes.ring
    norm = None if ring is None else notes.norm(scaler._per_optimizer_states)
    inverse = notes.inverse
    _C.update_scale(
        scale,
        growth_tracker,
        flags,
        *_rules(scaler),
        inverse,
        norm,
        *columns(ring),
        new_scale,
    )
    if inverse is not None:
        notes.note_inverse(scale)
