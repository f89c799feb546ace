# SPDX-License-Identifier: Apache-2.0
"""The report of a whole run: ``python -m fastamp --report FILE script.py``."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from fastamp._cli.output_file import output_file
from fastamp._trace import trace

__all__ = ["start"]


def start(path: str | os.PathLike[str]) -> trace:
    """Traces the process from now on and writes what was seen when the interpreter exits.

    Args:
        path: File to write: JSON if its name ends in ``.json``, else the table.

    Returns:
        The open trace.

    Raises:
        OSError: The file cannot be written; found out now, not at the end of the run.
    """
    file = output_file(path)
    running = trace(source=True)
    running.__enter__()
    atexit.register(_write, running, file)
    return running


def _write(running: trace, file: Path) -> None:
    running.__exit__(None, None, None)
    text = running.to_json() + "\n" if file.suffix == ".json" else str(running)
    try:
        file.write_text(text)
    except OSError as error:
        print(f"fastamp: the report was not written: {error}", file=sys.stderr)
