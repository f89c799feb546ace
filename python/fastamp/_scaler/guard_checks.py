# SPDX-License-Identifier: Apache-2.0
"""Checks of what a step guard is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastamp._scaler.checks import Past, checked_past
from fastamp.distributed._reduction import ProcessGroup

__all__ = [
    "check_group",
    "check_guard_options",
    "check_guarded",
    "check_spike_numbers",
    "checked_guard_past",
    "checked_norms",
]


def check_guarded(function: str, optimizer: Any) -> torch.optim.Optimizer:
    """Returns an optimizer whose steps can be guarded.

    Raises:
        TypeError: It is no optimizer.
        ValueError: Its step evaluates gradients more than once.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{function}: expected optimizer to be a torch.optim.Optimizer, "
            f"got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{function}: expected an optimizer whose step evaluates gradients once, got an "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def _check_int(function: str, name: str, value: Any, least: int, below: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{function}: expected {name} to be an int, got {type(value).__name__}")
    if not least <= value < below:
        raise ValueError(f"{function}: expected {least} <= {name} < {below}, got {value}")


def check_guard_options(
    function: str, skip: Any, spike_of: Any, max_consecutive: Any, history_size: Any
) -> None:
    """Refuses options that there are not.

    Raises:
        TypeError: A count is no int.
        ValueError: An option is none of its values, or out of its range.
    """
    for name, value, known in (
        ("skip", skip, ("nonfinite", "spike")),
        ("spike_of", spike_of, ("median", "mean")),
    ):
        if value not in known:
            raise ValueError(f"{function}: expected {name} to be one of {known}, got {value!r}")
    if max_consecutive is not None:
        _check_int(function, "max_consecutive", max_consecutive, 0, 2**31)
    _check_int(function, "history_size", history_size, 0, 2**24)


def check_group(function: str, group: Any) -> None:
    """Refuses with a TypeError what is neither ``None`` nor a process group."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{function}: expected group to be a ProcessGroup or None, got {type(group).__name__}"
        )


def check_spike_numbers(function: str, spike_factor: Any, spike_window: Any) -> None:
    """Refuses numbers of a spike rule by their type; by their value the native rule does.

    Raises:
        TypeError: One is no number.
        ValueError: The window is out of its range.
    """
    if isinstance(spike_factor, bool) or not isinstance(spike_factor, (int, float)):
        raise TypeError(
            f"{function}: expected spike_factor to be a float, got {type(spike_factor).__name__}"
        )
    _check_int(function, "spike_window", spike_window, 2, 65537)


def checked_guard_past(state: Any) -> Past:
    """Reads what the state of a guard says of past steps.

    Raises:
        ValueError: It does not have the form that ``StepGuard.state_dict`` gives it.
    """
    wanted = {"history", "overflow_report", "skipped_in_a_row", "spike"}
    if not isinstance(state, Mapping) or wanted - state.keys():
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"load_state_dict: expected the state of a StepGuard, with {sorted(wanted)}, got {got}"
        )
    return checked_past(state)


def checked_norms(state: Mapping[str, Any]) -> tuple[list[float], int]:
    """Reads the norms of a spike rule, none if they were not saved.

    Raises:
        ValueError: They do not have their form.
    """
    spike = state["spike"]
    if spike is None:
        return [], 0
    try:
        return [float(norm) for norm in spike["norms"]], int(spike["count"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            'load_state_dict: expected state_dict["spike"] to be None or to have "norms" and '
            f'"count", got {spike!r:.200}'
        ) from error
