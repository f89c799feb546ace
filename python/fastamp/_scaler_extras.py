"""What the gradient scaler has beyond torch's: bounds, hysteresis, agreement between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastamp import _C

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastamp.grad_scaler import GradScaler


def check_bound(
    function: str, name: str, value: Any, min_scale: float | None, max_scale: float | None
) -> None:
    """Refuses a value outside the bounds with a ValueError."""
    if min_scale is not None and not value >= min_scale:
        raise ValueError(f"{function}: expected {name} >= min_scale ({min_scale}), got {value!r}")
    if max_scale is not None and not value <= max_scale:
        raise ValueError(f"{function}: expected {name} <= max_scale ({max_scale}), got {value!r}")


def check_extras(
    function: str, min_scale: Any, max_scale: Any, hysteresis: Any
) -> dict[str, Any]:
    """Checks the options that torch's scaler does not have.

    Returns:
        The attributes of a scaler for those of them that are in use.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option is out of its range.
    """
    extras: dict[str, Any] = {}
    for name, value in (("min_scale", min_scale), ("max_scale", max_scale)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{function}: expected {name} to be a float or None, got {type(value).__name__}"
            )
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{function}: expected a finite {name} > 0, got {value!r}")
        extras[f"_{name}"] = float(value)
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"{function}: expected max_scale >= min_scale ({min_scale}), got {max_scale!r}"
        )
    if isinstance(hysteresis, bool) or not isinstance(hysteresis, int):
        raise TypeError(
            f"{function}: expected hysteresis to be an int, got {type(hysteresis).__name__}"
        )
    if not 1 <= hysteresis < 2**31:
        raise ValueError(f"{function}: expected 1 <= hysteresis < 2**31, got {hysteresis}")
    if hysteresis > 1:
        extras["_hysteresis"] = extras["_init_hysteresis_tracker"] = hysteresis
    return extras


def _number(state: Mapping[str, Any], key: str) -> Any:
    value = state[key]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(
            f'load_state_dict: expected state_dict["{key}"] to be a number, '
            f"got {type(value).__name__}"
        )
    return value


def checked_state(scaler: GradScaler, state: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a state_dict completely before anything is changed.

    Returns:
        The attributes that the scaler takes from it.
    """
    if len(state) == 0:
        raise RuntimeError(
            "load_state_dict: expected the state of an enabled scaler, got an empty one: "
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    hysteresis = state.get("hysteresis", scaler._hysteresis) if hasattr(state, "get") else 1
    attributes = {
        "_init_scale": _number(state, "scale"),
        "_growth_factor": _number(state, "growth_factor"),
        "_backoff_factor": _number(state, "backoff_factor"),
        "_growth_interval": _number(state, "growth_interval"),
        "_init_growth_tracker": _number(state, "_growth_tracker"),
    }
    attributes |= check_extras(
        "load_state_dict",
        state.get("min_scale", scaler._min_scale),
        state.get("max_scale", scaler._max_scale),
        hysteresis,
    )
    if hysteresis > 1:
        tracker = state.get("_hysteresis_tracker", hysteresis)
        if isinstance(tracker, bool) or not isinstance(tracker, int) or tracker < 0:
            raise ValueError(
                'load_state_dict: expected state_dict["_hysteresis_tracker"] to be an int >= 0, '
                f"got {tracker!r}"
            )
        attributes["_init_hysteresis_tracker"] = tracker
    return attributes


def agree_on_flags(
    flags: dict[torch.device, Tensor], scale: Tensor, device_type: str, group: ProcessGroup
) -> None:
    """Raises every flag, on every rank of the group, if any rank has raised one.

    Always exactly one collective, whatever gradients a rank holds, so that ranks cannot wait for
    each other; a rank without gradients gets a flag on the scale's device.

    Args:
        flags: The non-finite flag of each device, fp32 scalars; written in place.
        scale: The scale tensor.
        device_type: The scaler's kind of device; the collective runs there.
        group: The group to agree over.
    """
    if not flags:
        flags[scale.device] = torch.zeros((), dtype=torch.float32, device=scale.device)
    # Gradients offloaded to the host still have to be agreed on by the device's backend.
    offloaded = scale.device.type == "cpu" and device_type != "cpu"
    device = torch.device(device_type) if offloaded else scale.device
    combined = _C.combine_flags(list(flags.values()), device)
    torch.distributed.all_reduce(combined, torch.distributed.ReduceOp.MAX, group=group)
    for flag in flags.values():
        if flag is not combined:
            flag.copy_(combined, non_blocking=True)
