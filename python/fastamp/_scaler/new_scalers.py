# SPDX-License-Identifier: Apache-2.0
"""Gradient scalers in a trace: which ones there were, and how their scale changed."""

from __future__ import annotations

import math
from typing import Any

_listeners: dict[int, list[Any]] = {}  # By their identities, for threads that come and go.


def listen(found: list[Any]) -> None:
    """Adds every scaler that is made from now on to a list, until :func:`stop_listening`."""
    _listeners[id(found)] = found


def stop_listening(found: list[Any]) -> None:
    """Ends what :func:`listen` began."""
    _listeners.pop(id(found), None)


def note_scaler(scaler: Any) -> None:
    """Called by each scaler when it is made."""
    for found in tuple(_listeners.values()):
        found.append(scaler)


def describe(scaler: Any) -> dict[str, Any]:
    """Scale and history of a scaler, fastamp's or torch's. Waits for the device.

    Returns:
        ``enabled``; and if it is, ``scale`` now and, of fastamp's, ``history`` (``step``,
        ``scale``, ``skipped``, ``norm``, ``growth_tracker`` of the last iterations, oldest first)
        and ``skipped_steps``, how many of these were skipped. A norm that was not computed, or is
        not finite, is None.
    """
    # A scaler whose arguments were refused is enabled, but has no scale.
    if not scaler.is_enabled() or not hasattr(scaler, "_scale"):
        return {"enabled": False}
    record: dict[str, Any] = {"enabled": True, "scale": float(scaler.get_scale())}
    if hasattr(scaler, "history"):
        history = [dict(step._asdict()) for step in scaler.history()]
        for step in history:
            step["norm"] = step["norm"] if math.isfinite(step["norm"]) else None
        record["history"] = history
        record["skipped_steps"] = sum(step["skipped"] for step in history)
    return record


def as_lines(scalers: list[Any]) -> str:
    """Returns one line per scaler for people."""
    lines = []
    for number, scaler in enumerate(scalers, 1):
        record = describe(scaler)
        text = f"Scaler {number}: "
        if not record["enabled"]:
            text += "disabled"
        else:
            text += f"scale {record['scale']:g}"
            if "history" in record:
                text += f", {record['skipped_steps']} of {len(record['history'])} steps skipped"
        lines.append(text + "\n")
    return "".join(lines)
