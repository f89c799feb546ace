"""The spellings that torch deprecates, with its warnings."""

from __future__ import annotations

import warnings


def warn_of_spelling(old: str, new: str) -> None:
    """Emits torch's FutureWarning about a spelling, for the caller's caller."""
    warnings.warn(
        f"`torch.{old}` is deprecated. Please use `torch.{new}` instead.",
        FutureWarning,
        stacklevel=3,
    )


def check_device_type(function: str, expected: str, device_type: object) -> None:
    """Refuses any device type but the one that the function's name says."""
    if device_type != expected:
        raise ValueError(f"{function}: expected device_type {expected!r}, got {device_type!r}")
