# SPDX-License-Identifier: Apache-2.0
"""Listeners to native cores of gradient scalers that come into use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastamp._C as _C

_Listener = Callable[[Any, _C.ScalerCore], object]

_listeners: dict[_Listener, None] = {}  # A set in order, for threads that come and go.


def listen(listener: _Listener) -> None:
    """Calls a function with each scaler that is used first from now on, and its core."""
    _listeners[listener] = None


def stop_listening(listener: _Listener) -> None:
    """Ends what :func:`listen` began. Safe to call again."""
    _listeners.pop(listener, None)


def note_core(scaler: Any, core: _C.ScalerCore) -> None:
    """Called by each scaler when it has made its core."""
    for listener in tuple(_listeners):
        listener(scaler, core)
