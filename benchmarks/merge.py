# SPDX-License-Identifier: Apache-2.0
"""Puts the results of one machine together: ``python -m benchmarks merge A.json B.json ...``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results_file
from benchmarks.harness import Result


def main(arguments: Sequence[str]) -> int:
    """Writes one result; of a row that is in several files the last one counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks merge", description=__doc__)
    parser.add_argument("parts", type=Path, nargs="+", help="files that are missing are named")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/...")
    options = parser.parse_args(arguments)
    found = [path for path in options.parts if path.is_file()]
    if not found:
        parser.error("expected at least one file that exists, got none")
    environment, _, _ = results_file.load(found[0])
    rows: dict[str, Result] = {}
    notes = [f"{path.stem}: not measured" for path in options.parts if path not in found]
    for path in found:
        other, results, more = results_file.load(path)
        for name in results_file.MACHINE:
            if other.get(name) != environment.get(name):
                parser.error(f"{path}: {name} is {other.get(name)}, not {environment.get(name)}")
        rows.update({result.name: result for result in results})
        notes += [note for note in more if note not in notes]
        environment["load_at_end"] = other.get("load_at_end", "unknown")
    out = options.out or results_file.default_path(environment)
    results_file.save(out, environment, list(rows.values()), notes)
    print(f"{len(rows)} rows of {len(found)} files: {out}")
    return 0
