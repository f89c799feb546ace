# SPDX-License-Identifier: Apache-2.0
"""Public names of what is written in private modules."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

__all__ = ["publish"]


def publish(module: str, names: Mapping[str, Any]) -> None:
    """Gives classes and functions the names under which users import them.

    Called by each public module at its end. Pickles, and messages of Python, then name
    ``fastamp.casts.keep`` and not the file that it is written in, which may change.

    Args:
        module: The name of the public module.
        names: Its variables; those that ``__all__`` lists count.
    """
    for name in names["__all__"]:
        value = names[name]
        if isinstance(value, (type, FunctionType)) and "._" in value.__module__:
            value.__module__ = module
            value.__name__ = value.__qualname__ = name
