# SPDX-License-Identifier: Apache-2.0
"""How ``with`` calls C functions that enter regions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import fastamp._C as _C

__all__ = ["as_enter"]

#: Whether this Python looks for signals after ``with`` has called a C function.
_LOOKS_AFTER_ENTERING = sys.version_info >= (3, 14)


def as_enter(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns what a class is to have as ``__enter__`` to be entered by a C function.

    An interrupt then arrives before the function or inside the ``with`` statement, but not in
    between, where nobody would leave the region. (If another tool, such as dynamo, evaluates frames
    in Python's place, it may from Python 3.14 on.)
    """
    if not _LOOKS_AFTER_ENTERING:
        return function
    calling = _C.UninterruptedCall(function)

    @functools.wraps(function)
    def __enter__(self: Any) -> Any:  # noqa: N807
        return calling[self]

    return __enter__
