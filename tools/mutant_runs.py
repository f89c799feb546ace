# SPDX-License-Identifier: Apache-2.0
"""Runs of known breaks: results are stored one by one, and hold until a break or its file changes.

Used by tools/mutate_kernels.py and tools/mutate_host.py, which know how to try one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Generic, TypeVar

from mutant_kinds import Change

#: By name: "by" (what caught it, or "nothing"), "seen", "digest", "date".
Results = dict[str, dict[str, str]]
G = TypeVar("G")


@dataclass(frozen=True)
class Mutant(Generic[G]):
    """A change of a file.

    Attributes:
        group: Breaks of the file, and how to try them.
        change: What is broken.
        path: The file.
        name: The file and what is broken: no two mutants share it.
        parts: What a result depends on beside the changed file.
    """

    group: G
    change: Change
    path: Path
    name: str
    parts: object

    def text(self) -> str:
        """Returns the changed file.

        Raises:
            ValueError: The old text does not occur exactly once.
        """
        text = self.path.read_text(encoding="utf-8")
        if (times := text.count(self.change.old)) != 1:
            raise ValueError(f"{self.name}: the text to replace occurs {times} times")
        return text.replace(self.change.old, self.change.new)

    def digest(self) -> str:
        """Returns what a result is valid for."""
        return hashlib.sha256(repr((self.text(), self.parts)).encode()).hexdigest()

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.path.name


def table(mutants: Sequence[Mutant[G]], results: Results) -> str:
    """Returns the results in Markdown, then the mutants without one."""
    rows = ["| File | Break | Caught by | Seen |", "|---|---|---|---|"]
    open_ones = []
    for mutant in mutants:
        result = results.get(mutant.name)
        if result is None or result["digest"] != mutant.digest():
            open_ones.append(f"- {mutant.name}")
            continue
        seen = result["seen"] or mutant.change.equivalent or "**survives**"
        rows.append(f"| {mutant.file} | {mutant.change.name} | {result['by']} | {seen} |")
    return "\n".join([*rows, "", f"Not run yet: {len(open_ones)}", *open_ones])


def run_all(
    mutants: Sequence[Mutant[G]],
    attempt: Callable[[Mutant[G]], tuple[str, str]],
    stored: Path,
) -> int:
    """Runs what has no result yet; returns how many mutants should be caught and are not.

    Args:
        mutants: To try, in this order.
        attempt: Tries one; returns what caught it and what that saw, nothing if nothing did.
        stored: Where results are, and go.
    """
    results = read_results(stored)
    survivors = 0
    for number, mutant in enumerate(mutants, 1):
        result = results.get(mutant.name)
        start = time.monotonic()
        if result is None or result["digest"] != mutant.digest():
            by, seen = attempt(mutant)
            result = {"by": by if seen else "nothing", "seen": seen, "digest": mutant.digest()}
            result["date"] = date.today().isoformat()
            results[mutant.name] = result
            stored.write_text(json.dumps(results, indent=1), encoding="utf-8")
        survives = not result["seen"] and not mutant.change.equivalent
        survivors += survives
        outcome = "SURVIVES" if survives else f"{result['by']}: {result['seen']}"
        seconds = time.monotonic() - start
        print(f"{number:3}/{len(mutants)} {seconds:5.0f} s  {mutant.name}: {outcome}", flush=True)
    return survivors


def read_results(stored: Path) -> Results:
    """Returns the stored results; none if there is no file."""
    if not stored.is_file():
        return {}
    results: Results = json.loads(stored.read_text(encoding="utf-8"))
    return results


def parse(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line of either tool."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mutants with this in their name"
    )
    parser.add_argument("--table", action="store_true", help="print the stored results and end")
    return parser.parse_args(arguments)


def ninja() -> str:
    """Returns the command of ninja, of this environment where it has one."""
    own = Path(sys.executable).parent / "ninja"
    return str(own) if own.is_file() else "ninja"
