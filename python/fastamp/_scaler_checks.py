"""Checks of the gradient scaler's options: torch's conditions, and ours on what torch lacks."""

from __future__ import annotations

import math
from typing import Any

import torch


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


def check_extras(function: str, min_scale: Any, max_scale: Any, hysteresis: Any) -> dict[str, Any]:
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
