"""Measures fastamp beside torch.amp and prints a table that names every row where it is slower."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

# Before libgomp is loaded: threads that wait by spinning take the processor from each other where
# other programs run too, and rows of many short parallel loops then measure that instead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fastamp import _cpu_isa

ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute, less certain")
    parser.add_argument("--filter", default="", metavar="RE", help="only rows that match")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    parser.add_argument("--out", type=Path, help="raw results (default: benchmarks/results/...)")
    options = parser.parse_args()
    try:
        options.filter = re.compile(options.filter)
    except re.error as error:
        parser.error(f"argument --filter: {error}")
    return options


def main() -> int:
    """Runs what was asked for."""
    options = parse()
    level = _cpu_isa.best_level(ROOT / "build" / "cpu_isa.json")
    if level:  # before oneDNN's first use, which reads it
        os.environ.setdefault(_cpu_isa.VARIABLE, level)
    from benchmarks.run import list_rows, run

    if options.list:
        list_rows(options.filter)
        return 0
    return run(options.filter, options.quick, options.out)


if __name__ == "__main__":
    sys.exit(main())
