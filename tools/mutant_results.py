# SPDX-License-Identifier: Apache-2.0
"""What is known of mutants that were drawn at random: a line each in a file of the repository."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

from tracked_files import ROOT, replace_text

FILE = ROOT / "tests" / "mutants_at_random.jsonl"
#: By a mutant's key: "is" (killed, hangs, survives, not reached; open: C++ tests have not noticed),
#: "by" what, its "name", and the states of "C++ tests" and "Python tests" that have been run.
Results = dict[str, dict[str, str]]


def read(file: Path = FILE) -> Results:
    """Returns the results; none if there is no file."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return dict(json.loads(line) for line in text.splitlines())


def note(key: str, result: dict[str, str], file: Path = FILE) -> None:
    """Stores a result in place of an earlier one."""
    _write({**read(file), key: result}, file)


def drop_others(keys: Container[str], file: Path = FILE) -> None:
    """Drops the results of mutants that can no longer be drawn."""
    results = read(file)
    known = {key: result for key, result in results.items() if key in keys}
    if known != results:
        _write(known, file)


def _write(results: Results, file: Path) -> None:
    lines = sorted((result.get("name", ""), key) for key, result in results.items())
    text = "".join(json.dumps([key, results[key]]) + "\n" for _, key in lines)
    replace_text(file, text)
