# SPDX-License-Identifier: Apache-2.0
"""Output that cannot be written: nobody reads it any more (``| head``), or has no such letters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["ends_with_its_reader", "flush_output", "forget_output", "shows_any_text"]

#: As a shell shows a program that SIGPIPE has ended.
_STATUS = 128 + 13


def flush_output() -> None:
    """Flushes the standard output, which a shell may have closed: ``>&-``."""
    if sys.stdout is not None:
        sys.stdout.flush()


def forget_output() -> None:
    """Sends what is left to nowhere: the interpreter would fail to write it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def shows_any_text() -> Iterator[None]:
    """Escapes what the streams cannot encode in our own output, such as names of the user's."""
    streams = [each for each in (sys.stdout, sys.stderr) if hasattr(each, "reconfigure")]
    handlers = [each.errors for each in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, handlers, strict=True):
            stream.reconfigure(errors=errors)


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Ends the process silently if nobody reads a command's output, with SIGPIPE's status.

    With status 1 and the reason if it cannot be written, as on a full disk.
    """
    try:
        try:
            with shows_any_text():
                yield
        finally:
            flush_output()
    except BrokenPipeError:
        forget_output()
        sys.exit(_STATUS)
    except OSError as error:
        forget_output()
        sys.stderr.write(f"python -m fastamp: {error}\n")
        sys.exit(1)
