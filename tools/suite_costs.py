# SPDX-License-Identifier: Apache-2.0
"""tests/costs.tsv: what each part of a run of the tests costs, in seconds of one core.

`make test-costs` runs everything and writes it: the CPU time of ctest entries and pytest files,
children included, and how long each source of a test takes to compile. The queue runs by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tracked_files import ROOT, replace_text

FILE = ROOT / "tests" / "costs.tsv"
HEADER = "# seconds\twhat\tname\n"
Costs = dict[tuple[str, str], float]  # by what it is and its name
# What a compilation of a test makes: <folder>/CMakeFiles/<target>.dir/<source>.o
_OBJECT = re.compile(r"^(tests|benchmarks)/(?:.*/)?CMakeFiles/([^/]+)\.dir/(.*)\.(?:o|gch)$")


def read(file: Path = FILE) -> Costs:
    """Returns the table; empty where there is none."""
    if not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {(what, name): float(seconds) for seconds, what, name in rows}


def write(costs: Mapping[tuple[str, str], float], file: Path = FILE) -> None:
    """Writes the table: by what it is, the dearest first."""
    rows = sorted(costs.items(), key=lambda row: (row[0][0], -row[1], row[0][1]))
    text = "".join(f"{seconds:.1f}\t{what}\t{name}\n" for (what, name), seconds in rows)
    replace_text(file, HEADER + text)


def compilations(build_dir: Path) -> Costs:
    """Returns how long the sources of tests took to compile when they last were, as ninja logs."""
    log = build_dir / ".ninja_log"
    found: Costs = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        fields = line.split("\t")
        match = _OBJECT.match(fields[3]) if len(fields) == 5 else None
        if match:
            source = re.sub(r"^(__/)+", "", match[3])
            found["compile", f"{match[2]} {source}"] = (int(fields[1]) - int(fields[0])) / 1e3
    return found


def longest_first(names: Iterable[tuple[str, str]], costs: Costs) -> list[tuple[str, str]]:
    """Returns the names in the order in which to run them; those without a cost come first."""
    return sorted(names, key=lambda name: -costs.get(name, float("inf")))
