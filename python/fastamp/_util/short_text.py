# SPDX-License-Identifier: Apache-2.0
"""Values as errors show them."""

from __future__ import annotations

from typing import Any

__all__ = ["short"]


def short(value: Any, length: int = 50) -> str:
    """Returns the start of a value's repr; of an int that is longer, how long it is.

    Python refuses to write ints of thousands of digits, with a ValueError of its own.
    """
    if isinstance(value, int) and value.bit_length() > 3 * length:
        return f"an int of {value.bit_length()} bits"
    return repr(value)[:length]
