# SPDX-License-Identifier: Apache-2.0
"""What is known of mutants that were drawn at random: lines that runs append to one file."""

from __future__ import annotations

import json
from pathlib import Path

#: By a mutant's key: "is" (killed, hangs, survives, not reached; open: C++ tests have not noticed),
#: "by" what, its "name", and the states of "C++ tests" and "Python tests" that have been run.
Results = dict[str, dict[str, str]]


def read(file: Path) -> Results:
    """Returns the last result of each mutant; none if there is no file."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return dict(json.loads(line) for line in text.splitlines())


def note(file: Path, key: str, result: dict[str, str]) -> None:
    """Adds a result."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps([key, result]) + "\n")
