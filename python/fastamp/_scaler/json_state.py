# SPDX-License-Identifier: Apache-2.0
"""The state of a gradient scaler as JSON."""

from __future__ import annotations

from typing import Any

import fastamp._C as _C


def json_of_state(state: dict[str, Any]) -> str:
    """Writes a ``state_dict``, empty for a disabled scaler; the past in it is left out."""
    return _C.scaler_to_json(state) if state else _C.disabled_scaler_to_json()


def state_of_json(function: str, text: Any) -> dict[str, Any]:
    """Reads what :func:`json_of_state` wrote.

    Raises:
        TypeError: ``text`` is no string.
        ValueError: It is none that :func:`json_of_state` writes.
    """
    if not isinstance(text, str):
        raise TypeError(f"{function}: expected text to be a str, got {type(text).__name__}")
    return _C.scaler_from_json(text)
