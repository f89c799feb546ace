# SPDX-License-Identifier: Apache-2.0
"""Checks that sources are ASCII, without tabs (Makefiles apart) or blanks at the ends of lines."""

from __future__ import annotations

import sys
from pathlib import Path

from tracked_files import ROOT, report, tracked_files

# Text of other authors, kept as it is; and data.
EXEMPT_NAMES = {"LICENSE"}
TEXT = (
    *(".h", ".cpp", ".cu", ".cuh", ".inc", ".in", ".py", ".pyi", ".cmake", ".txt", ".sh", ".md"),
    *(".toml", ".json", ".yml", ".yaml", "Makefile", "VERSION", "run"),
)


def line_problem(name: str, line: bytes) -> str | None:
    """Returns what is wrong with a line, or None."""
    if not line.isascii():
        return f"not ASCII: {line.decode('utf-8', 'replace').strip()}"
    if b"\t" in line and name != "Makefile":
        return "tab"
    if line.rstrip() != line:
        return "blanks at the end"
    return None


def check(root: Path) -> list[str]:
    """Returns one line, "path:line: problem", for each bad line below root."""
    found = []
    for path in tracked_files(root, *TEXT):
        relative = path.relative_to(root)
        if path.name in EXEMPT_NAMES or relative.parts[:2] == ("benchmarks", "results"):
            continue
        content = path.read_bytes()
        for number, line in enumerate(content.split(b"\n"), 1):
            problem = line_problem(path.name, line)
            if problem:
                found.append(f"{relative}:{number}: {problem}")
        if content and not content.endswith(b"\n"):
            found.append(f"{relative}: no newline at the end")
    return found


if __name__ == "__main__":
    sys.exit(report(check(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
