# SPDX-License-Identifier: Apache-2.0
"""Checks that every source names its licence in its first line, by the identifier of SPDX.

--write puts the line where it is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracked_files import ROOT, report, tracked_files

IDENTIFIER = "SPDX-License-Identifier: Apache-2.0"
COMMENT = {".py": "#", ".pyi": "#", ".sh": "#"}
CPP = (".h", ".cpp", ".cu", ".cuh", ".inc")


def license_line(path: Path) -> str:
    """Returns the line as the language of a file writes it."""
    return f"{COMMENT.get(path.suffix, '//')} {IDENTIFIER}\n"


def has_line(text: str, line: str) -> bool:
    """Whether it is the first one, after #! if that is there. Empty files need none."""
    lines = text.splitlines(keepends=True)
    first = 1 if lines and lines[0].startswith("#!") else 0
    return len(lines) <= first or lines[first] == line


def with_line(text: str, line: str) -> str:
    """Returns the text with the line in front."""
    if text.startswith("#!"):
        first, rest = text.split("\n", 1)
        return f"{first}\n{line}{rest}"
    return line + text


def check(root: Path, *, write: bool = False) -> list[str]:
    """Returns one line, "path: problem", for each source without the identifier."""
    found = []
    for path in tracked_files(root, *CPP, *COMMENT):
        line, text = license_line(path), path.read_text()
        if not has_line(text, line):
            if write:
                path.write_text(with_line(text, line))
            else:
                found.append(f"{path.relative_to(root)}:1: expected {line.strip()}")
    return found


if __name__ == "__main__":
    sys.exit(report(check(ROOT, write="--write" in sys.argv[1:])))
