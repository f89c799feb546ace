# SPDX-License-Identifier: Apache-2.0
"""The warning of a run that goes on with its optimizer's state, but not with its scaler's."""

from __future__ import annotations

import warnings
from typing import Any

from fastamp._scaler.reports import caller_level

__all__ = ["goes_on", "warn_of_missing_state"]


def goes_on(optimizer: Any) -> bool:
    """Whether an optimizer has loaded a state from after its first step.

    ``Optimizer.state_dict`` writes "params" of a group last, and ``load_state_dict`` takes such
    groups over; those that an optimizer was made with have it first.
    """
    groups = getattr(optimizer, "param_groups", ())
    if not groups or any(next(iter(group), "params") == "params" for group in groups):
        return False
    states = getattr(optimizer, "state", {}).values()
    return any(value is not None for state in states for value in dict(state).values())


def warn_of_missing_state(optimizer: Any, scale: float) -> None:
    """Warns at the line of the program that called ``scaler.step``."""
    name = type(optimizer).__name__
    warnings.warn(
        f"GradScaler: expected a scaler that goes on where its optimizer does, got one that begins "
        f"anew, at a scale of {scale:g}: {name}.load_state_dict() was called, and the scaler's was "
        "not. Save scaler.state_dict() beside the optimizer's, and load it. If the scaler is to "
        "begin anew, scaler.load_state_dict(scaler.state_dict()) says so.",
        stacklevel=caller_level(),
    )
