# SPDX-License-Identifier: Apache-2.0
"""The report of a whole run: ``python -m fastamp --report FILE script.py``."""

from __future__ import annotations

import atexit
import os
import sys

from fastamp._cli.closed_pipe import forget_output
from fastamp._cli.output_file import OutputFile
from fastamp._debug.trace import trace
from fastamp._util.tool_guard import ToolGuard

__all__ = ["start"]


def start(path: str | os.PathLike[str]) -> trace:
    """Traces the process from now on and writes what was seen when the interpreter exits.

    Args:
        path: JSON if its name ends in ``.json``, a page if in ``.html``, else the table; ``-``
            prints that.

    Returns:
        The open trace.

    Raises:
        OSError: The file cannot be written; found out now, not at the end of the run.
    """
    file = OutputFile(path)
    running = trace(source=True)
    running.__enter__()
    guard = ToolGuard("fastamp --report", "is not written")
    atexit.register(guard.run, _write, running, file, os.getpid())
    return running


def _write(running: trace, file: OutputFile, process: int) -> None:
    running.__exit__(None, None, None)
    if os.getpid() != process:
        return  # A fork that came back from its work.
    try:
        path = file.put(running)
        if path is not None:
            print(f"fastamp: what autocast did is in {path}", file=sys.stderr)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            forget_output()
        print(f"fastamp: the report was not written: {error}", file=sys.stderr)
