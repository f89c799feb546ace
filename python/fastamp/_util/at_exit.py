# SPDX-License-Identifier: Apache-2.0
"""Calls at the end of a process, of one that multiprocessing has started, too."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import warnings
from collections.abc import Callable

__all__ = ["AtExit", "warn_at_exit"]


def warn_at_exit(text: str) -> None:
    """Gives a UserWarning of the command. At exit no line of the program is running that it names.

    Args:
        text: What is printed also where the program's filters make errors of warnings: there is
            nobody left to catch one.
    """
    try:
        warnings.warn_explicit(text, UserWarning, "python -m fastamp", 1)
    except Warning:
        print(text, file=sys.stderr)


class AtExit:
    """Calls a function once, when the process that makes the object ends; not in forks of it.

    Args:
        function: Without arguments; its result is not used.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        """Calls the function when the process ends."""
        self._function = function
        self._process = os.getpid()
        self._arrange()
        # A child of multiprocessing leaves without atexit, and forgets the finalizers that it has
        # made before its function is called.
        multiprocessing.util.register_after_fork(self, AtExit._arrange)

    def _arrange(self) -> None:
        if os.getpid() == self._process:
            self._call = multiprocessing.util.Finalize(None, self._function, exitpriority=0)

    def cancel(self) -> None:
        """Does not call the function."""
        self._call.cancel()
