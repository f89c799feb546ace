# SPDX-License-Identifier: Apache-2.0
"""Writes what readers see of the raw results: ``python -m benchmarks.report [--check]``.

docs/performance.md with its plots, and the table between the markers of the README. A number
without its raw samples in benchmarks/results/ does not appear.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from benchmarks import results_file
from benchmarks.environment import ROOT
from benchmarks.pages import page, readme_table

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
PLOTS = ROOT / "docs" / "plots"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def newest_results(folder: Path = results_file.FOLDER) -> dict[str, Path]:
    """Returns the newest result for each kind of machine: ``none`` (no GPU), or the GPU's name."""
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        environment, _, _ = results_file.load(path)
        gpu, date = environment["gpu"], environment["date"]
        if gpu not in found or found[gpu][0] <= date:
            found[gpu] = (date, path)
    return {gpu: path for gpu, (_, path) in sorted(found.items())}


def with_table(readme: str, table: str) -> str:
    """Returns the README with the table between its markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def texts() -> dict[Path, str]:
    """Returns what is written, by file; plots left out."""
    results = newest_results()
    return {
        PAGE: page(results),
        README: with_table(README.read_text(encoding="utf-8"), readme_table(results)),
    }


def stale() -> list[Path]:
    """Returns the files that are not what would be written; of plots, only that they are there."""
    found = [
        path
        for path, text in texts().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    linked = page(newest_results()).split("](plots/")[1:]
    plots = [PLOTS / link.partition(")")[0] for link in linked]
    return found + [path for path in plots if not path.exists()]


def draw() -> None:
    """Draws the plots of every result that is shown; removes old ones."""
    from benchmarks.pages import figures

    for old in PLOTS.glob("*.svg"):
        old.unlink()
    for path in newest_results().values():
        _, results, _ = results_file.load(path)
        figures(path, results, PLOTS)


def main() -> int:
    """Writes the files, or with --check returns 1 if one is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether all is up to date")
    if parser.parse_args().check:
        for path in stale():
            print(f"{path.relative_to(ROOT)} is not up to date: python -m benchmarks.report")
        return int(bool(stale()))
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        print("left out: plots: matplotlib is not installed")
    else:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
