# SPDX-License-Identifier: Apache-2.0
"""Why steps of gradient scalers were skipped, where a tool has looked at them."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["cause_of", "note_cause"]

_causes: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def note_cause(scaler: Any, text: str) -> None:
    """Notes why the step that a scaler has just skipped was: called by check and inspect."""
    step = scaler.overflow_report().step
    if step is not None:
        _causes[scaler] = step, text


def cause_of(scaler: Any, step: int | None) -> str:
    """The sentence about the step of that number; empty if no tool has looked at it."""
    noted, text = _causes.get(scaler, (None, ""))
    return text if noted is not None and noted == step else ""
