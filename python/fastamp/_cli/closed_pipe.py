# SPDX-License-Identifier: Apache-2.0
"""Output into a pipe that nobody reads any more, such as that of ``| head``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["ends_with_its_reader", "forget_output"]

#: As a shell shows a program that SIGPIPE has ended.
_STATUS = 128 + 13


def forget_output() -> None:
    """Sends what is left to nowhere: the interpreter would fail to write it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Ends the process silently if nobody reads our own output, with SIGPIPE's status."""
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        forget_output()
        sys.exit(_STATUS)
