# SPDX-License-Identifier: Apache-2.0
"""Files that commands write at their end."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["output_file"]


def output_file(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a file to write later: programs may change their folder.

    Raises:
        OSError: It cannot be written; found out now, not at the end of a long run. Nothing is left
            behind, nor is a file that is there changed.
    """
    file = Path(path).absolute()
    is_there = file.exists()
    file.open("a").close()
    if not is_there:
        file.unlink()
    return file
