"""Runs the rows with a progress bar, saves the raw results and prints the table."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tqdm import tqdm

from benchmarks import cpp_guard, results_file
from benchmarks.environment import ROOT, describe
from benchmarks.harness import Effort, Result, Row, measure
from benchmarks.rows import all_rows
from benchmarks.table import summary, text_table

QUICK = Effort(repeats=101, block_seconds=5e-4, row_seconds=0.5, least_repeats=31)


def list_rows(pattern: re.Pattern[str]) -> None:
    """Prints the names of the rows that match."""
    for name in (*(row.name for row in all_rows()), cpp_guard.NAME):
        if pattern.search(name):
            print(name)


def measure_all(rows: list[Row], guard: bool, effort: Effort) -> tuple[list[Result], list[str]]:
    """Returns the results, and a note for each row that could not be measured."""
    results, notes = [], []
    terminal = sys.stderr.isatty()
    size = {} if terminal else {"ncols": 78}
    with tqdm(
        total=len(rows) + guard, unit="row", mininterval=0.1 if terminal else 5, **size
    ) as bar:
        for row in rows:
            bar.set_description(f"{row.name[:34]:34}")
            results.append(measure(row, effort))
            bar.update()
        if guard:
            bar.set_description(f"{cpp_guard.NAME:34}")
            result = cpp_guard.measure_guard(effort)
            results += [] if result is None else [result]
            notes += [cpp_guard.HOW_TO_GET_IT] if result is None else []
            bar.update()
    return results, notes


def run(pattern: re.Pattern[str], quick: bool, out: Path | None) -> int:
    """Measures the rows that match and returns the exit status."""
    rows = [row for row in all_rows() if pattern.search(row.name)]
    guard = pattern.search(cpp_guard.NAME) is not None
    if not rows and not guard:
        print(f"no row matches {pattern.pattern!r}; --list names them", file=sys.stderr)
        return 2
    environment = describe()
    for name, value in environment.items():
        print(f"{name:20}{value}")
    if environment["gpu"] == "none":
        print("no CUDA GPU here: CPU rows only")
    sys.stdout.flush()
    results, notes = measure_all(rows, guard, QUICK if quick else Effort())
    if out is None:
        partial = quick or bool(pattern.pattern)
        default = results_file.default_path(environment)
        out = ROOT / "build" / "bench" / "partial.json" if partial else default
    results_file.save(out, environment, results, notes)
    if results:
        print(f"\n{text_table(results)}\n\n{summary(results)}")
    print("\n".join(notes), end="\n" if notes else "")
    print(f"raw results: {os.path.relpath(out)}")
    return 0
