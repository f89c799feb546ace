# SPDX-License-Identifier: Apache-2.0
"""Checks of what a gradient scaler is given: torch's conditions, and more on what torch lacks."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastamp._scaler.reports import UNREADABLE, OverflowReport, StepRecord, report_from_dict
from fastamp._util.short_text import short

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


_GREATEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def is_finite_in_float32(number: float) -> bool:
    """Whether a number is neither inf nor NaN in float32."""
    return abs(number) <= _GREATEST_FLOAT32


def cuda_is_missing() -> bool:
    """Whether torch.amp would disable a scaler for CUDA on this machine."""
    common: Any = torch.cuda.amp.common
    return bool(common.amp_definitely_not_available())


def check_factors(function: str, growth_factor: Any, backoff_factor: Any) -> None:
    """Refuses with an AssertionError exactly the factors that torch.amp refuses."""
    if growth_factor <= 1.0:
        raise AssertionError(
            f"{function}: expected growth_factor > 1.0, got {growth_factor!r}: "
            "The growth factor must be > 1.0."
        )
    if backoff_factor >= 1.0:
        raise AssertionError(
            f"{function}: expected backoff_factor < 1.0, got {backoff_factor!r}: "
            "The backoff factor must be < 1.0."
        )


def check_bound(
    function: str, name: str, value: Any, min_scale: float | None, max_scale: float | None
) -> None:
    """Refuses a value outside the bounds with a ValueError."""
    if min_scale is not None and not value >= min_scale:
        raise ValueError(f"{function}: expected {name} >= min_scale ({min_scale}), got {value!r}")
    if max_scale is not None and not value <= max_scale:
        raise ValueError(f"{function}: expected {name} <= max_scale ({max_scale}), got {value!r}")


def _check_count(function: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{function}: expected {name} to be an int, got {type(value).__name__}")
    if not 1 <= value < 2**31:
        raise ValueError(f"{function}: expected 1 <= {name} < 2**31, got {value}")


def check_extras(
    function: str, min_scale: Any, max_scale: Any, hysteresis: Any, fast_growth_interval: Any
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
        if not 0 < value <= sys.float_info.max:
            raise ValueError(f"{function}: expected a finite {name} > 0, got {value!r}")
        extras[f"_{name}"] = float(value)
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"{function}: expected max_scale >= min_scale ({min_scale}), got {max_scale!r}"
        )
    _check_count(function, "hysteresis", hysteresis)
    if hysteresis > 1:
        extras["_hysteresis"] = extras["_init_hysteresis_tracker"] = hysteresis
    if fast_growth_interval is not None:
        _check_count(function, "fast_growth_interval", fast_growth_interval)
        extras["_fast_growth_interval"] = fast_growth_interval
    return extras


def check_step_options(
    function: str, fuse: Any, keep_scaled_grads: Any, history_size: Any
) -> dict[str, Any]:
    """Checks the options on steps and history, as :func:`check_extras` does."""
    for name, value in (("fuse", fuse), ("keep_scaled_grads", keep_scaled_grads)):
        if not isinstance(value, bool):
            raise TypeError(f"{function}: expected {name} to be a bool, got {type(value).__name__}")
    extras: dict[str, Any] = {}
    if fuse:
        extras["_fuse"] = True
    if keep_scaled_grads:
        extras["_keep_scaled_grads"] = True
    if history_size is not None:
        if isinstance(history_size, bool) or not isinstance(history_size, int):
            raise TypeError(
                f"{function}: expected history_size to be an int or None, "
                f"got {type(history_size).__name__}"
            )
        if not 0 <= history_size < 2**24:
            raise ValueError(f"{function}: expected 0 <= history_size < 2**24, got {history_size}")
        extras["_history_size"] = history_size
    return extras


def checked_scale(
    scale: Tensor,
    new_scale: float | Tensor,
    device: str,
    min_scale: float | None,
    max_scale: float | None,
) -> Tensor:
    """Returns a user's scale as a tensor like ``scale``, or refuses it as torch does."""
    if isinstance(new_scale, float):
        check_bound("update", "new_scale", new_scale, min_scale, max_scale)
        return torch.full_like(scale, new_scale)
    if not isinstance(new_scale, torch.Tensor):
        raise AttributeError(
            f"update: new_scale should be a float or a Tensor, got {type(new_scale).__name__}"
        )
    for accepted, got in (
        (new_scale.device.type == device, f"a tensor on {new_scale.device}"),
        (new_scale.numel() == 1, f"a tensor of shape {tuple(new_scale.shape)}"),
        (not new_scale.requires_grad, "a tensor with requires_grad=True"),
    ):
        if not accepted:
            raise AssertionError(
                "update: new_scale should be a float or a 1-element tensor on a "
                f"{device} device with requires_grad=False, got {got}"
            )
    return torch.empty_like(scale).copy_(new_scale)


def _number(state: Mapping[str, Any], key: str) -> Any:
    value = state[key]
    expected = f'load_state_dict: expected state_dict["{key}"] to be a number'
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{expected}, got {type(value).__name__}")
    try:
        float(value)
    except OverflowError as error:
        raise ValueError(f"{expected} in the range of float64, got one beyond it") from error
    except (RuntimeError, TypeError, ValueError) as error:  # A tensor of several elements.
        raise TypeError(f"{expected}, got {value!r:.200}") from error
    return value


def checked_state(
    state: Mapping[str, Any],
    hysteresis: int,
    min_scale: float | None,
    max_scale: float | None,
    fast_growth_interval: int,
) -> dict[str, Any]:
    """Reads a state_dict completely before anything is changed.

    Args:
        state: The state.
        hysteresis: The scaler's, for a state that does not name it, as the bounds are.
        min_scale: Lower bound of the scale.
        max_scale: Upper bound of the scale.
        fast_growth_interval: 0 if growth is never fast.

    Returns:
        The attributes that the scaler takes from it.
    """
    if len(state) == 0:
        raise RuntimeError(
            "load_state_dict: expected the state of an enabled scaler, got an empty one: "
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    attributes = {
        "_init_scale": _number(state, "scale"),
        "_growth_factor": _number(state, "growth_factor"),
        "_backoff_factor": _number(state, "backoff_factor"),
        "_growth_interval": _number(state, "growth_interval"),
        "_init_growth_tracker": _number(state, "_growth_tracker"),
    }
    wanted = state.get("hysteresis", hysteresis)
    attributes |= {"_hysteresis": 1} if wanted != hysteresis else {}
    attributes |= check_extras(
        "load_state_dict",
        state.get("min_scale", min_scale),
        state.get("max_scale", max_scale),
        wanted,
        state.get("fast_growth_interval", fast_growth_interval or None),
    )
    limit = state.get("_fast_growth_limit", math.inf)
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not is_number or not (is_finite_in_float32(limit) or abs(limit) == math.inf):
        raise ValueError(
            'load_state_dict: expected state_dict["_fast_growth_limit"] to be inf or in float32, '
            f"got {short(limit)}"
        )
    if "_fast_growth_interval" in attributes:
        attributes["_init_fast_growth_limit"] = float(limit)
    if wanted > 1:
        tracker = state.get("_hysteresis_tracker", wanted)
        if isinstance(tracker, bool) or not isinstance(tracker, int) or not 0 <= tracker < 2**31:
            raise ValueError(
                'load_state_dict: expected state_dict["_hysteresis_tracker"] to be an int >= 0 and '
                f"< 2**31, got {short(tracker)}"
            )
        attributes["_init_hysteresis_tracker"] = tracker
    return attributes


def _checked_history(data: Any) -> list[StepRecord]:
    """Reads rows of a checkpoint.

    Raises:
        ValueError: They are not a list of five numbers each, of consecutive steps.
    """
    try:
        records = [
            StepRecord(int(step), float(scale), bool(skipped), float(norm), int(tracker))
            for step, scale, skipped, norm, tracker in data
        ]
    except UNREADABLE as error:
        raise ValueError(
            'load_state_dict: expected state_dict["history"] to have rows of (step, scale, '
            f"skipped, norm, growth tracker), got {data!r:.200}"
        ) from error
    steps = [record.step for record in records]
    if steps and steps != list(range(steps[0], steps[0] + len(steps))):
        raise ValueError(
            f'load_state_dict: expected consecutive steps in state_dict["history"], got {steps}'
        )
    return records


class Past(NamedTuple):
    """Past iterations, as a checkpoint has them."""

    history: list[StepRecord]
    report: OverflowReport | None
    skipped_in_a_row: int


def checked_past(state: Mapping[str, Any]) -> Past:
    """Reads what a checkpoint says about past iterations, nothing if it was not saved.

    Raises:
        ValueError: It does not have the form that ``GradScaler.state_dict`` gives it.
    """
    report = state.get("overflow_report")
    skips = state.get("skipped_in_a_row", 0)
    if not isinstance(skips, int) or skips < 0:
        raise ValueError(
            'load_state_dict: expected state_dict["skipped_in_a_row"] to be an int >= 0, '
            f"got {skips!r}"
        )
    history = _checked_history(state.get("history", []))
    name = 'state_dict["overflow_report"]'
    known = None if report is None else report_from_dict(report, "load_state_dict", name)
    return Past(history, known, skips)
