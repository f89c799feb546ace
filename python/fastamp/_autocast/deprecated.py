# SPDX-License-Identifier: Apache-2.0
"""The spellings that torch deprecates, with its warnings."""

from __future__ import annotations

import warnings
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from fastamp._dynamo import compiler

if TYPE_CHECKING:
    from fastamp._autocast.region import autocast


def warn_of_spelling(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Emits torch's FutureWarning about a spelling.

    Args:
        old: What was called, without ``torch.``
        new: What torch wants called instead.
        stacklevel: Whose line is named: 1 for the caller's, 2 for the caller's caller's.
    """
    warnings.warn(
        f"`torch.{old}` is deprecated. Please use `torch.{new}` instead.",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )


def check_region(expected: str, device_type: object) -> None:
    """Begins the constructor of a deprecated region class: it warns, as torch's does.

    Args:
        expected: The device type that the class's module is for.
        device_type: The one that was given.

    Raises:
        ValueError: They differ.
    """
    name = f"{expected}.amp.autocast"
    warn_of_spelling(f"{name}(args...)", f"amp.autocast('{expected}', args...)", stacklevel=3)
    if device_type != expected:
        raise ValueError(f"{name}: expected device_type {expected!r}, got {device_type!r}")


def _as_torch(enabled: bool, dtype: torch.dtype, cache_enabled: bool, *, device_type: str) -> Any:
    return torch.amp.autocast_mode.autocast(device_type, dtype, enabled, cache_enabled)


def trace_as_torchs(region_class: type[autocast]) -> None:
    """Lets dynamo trace a deprecated region class as ``torch.autocast`` with the class's defaults.

    dynamo follows no closure here, so each class has a function with defaults of its own.
    """
    init: Any = region_class.__init__
    traced = FunctionType(_as_torch.__code__, globals(), "_as_torch", init.__defaults__)
    traced.__kwdefaults__ = init.__kwdefaults__
    compiler.when_dynamo_loads(lambda: compiler.trace_as_torch_autocast(region_class, traced))
