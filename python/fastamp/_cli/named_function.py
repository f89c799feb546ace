# SPDX-License-Identifier: Apache-2.0
"""Functions of a user's that commands are given by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["call_named"]


def call_named(name: str, refuse: Callable[[str, int], Any]) -> Any:
    """Imports a module as ``python -m`` would and returns what a function in it returns.

    Args:
        name: ``MODULE:FUNCTION``.
        refuse: Called with what is wrong and the exit status; ends the process.
    """
    module, _, function = name.partition(":")
    if not module or not function or module.startswith("."):
        refuse(f"expected MODULE:CALLABLE, got {name!r}", 2)
    if module.endswith(".py") or os.sep in module:
        refuse(f"expected MODULE as after `python -m`, such as train, got the file {module!r}", 2)
    if os.getcwd() not in sys.path:  # noqa: PTH109 (as Python spells it there)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        refuse(f"expected {name} to be there, got {type(error).__name__}: {error}", 1)
    if not callable(found):
        refuse(f"expected {name} to be a function, got {type(found).__name__}", 2)
    return found()
