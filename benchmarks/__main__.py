# SPDX-License-Identifier: Apache-2.0
"""Measures fastamp beside torch.amp and prints a table that names every row where it is slower.

``python -m benchmarks compare OLD.json NEW.json`` says what became slower between two results;
``python -m benchmarks merge A.json B.json ...`` puts results of one machine together.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

# Before libgomp is loaded: threads that wait by spinning take the processor from each other where
# other programs run too, and rows of many short parallel loops then measure that instead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without a GPU torch's profiler would log into the progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from fastamp._util import cpu_isa

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MINUTES, QUICK_MINUTES = 8.0, 0.8


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, less certain")
    parser.add_argument("--filter", default="", metavar="RE", help="only rows that match")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    parser.add_argument("--out", type=Path, help="raw results (default: benchmarks/results/...)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that --out holds from this machine and revision, measure the others",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), help="default: what is there")
    parser.add_argument("--minutes", type=float, help="about how long to measure (8; quick: 0.8)")
    options = parser.parse_args(arguments)
    if options.resume and options.out is None:
        parser.error("argument --resume: expected --out too, got none")
    try:
        options.filter = re.compile(options.filter)
    except re.error as error:
        parser.error(f"argument --filter: {error}")
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else DEFAULT_MINUTES
    if not options.minutes > 0:
        parser.error(f"argument --minutes: expected more than 0, got {options.minutes}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs what was asked for."""
    if arguments[:1] == ["compare"]:
        from benchmarks.compare import main as compare

        return compare(arguments[1:])
    if arguments[:1] == ["merge"]:
        from benchmarks.merge import main as merge

        return merge(arguments[1:])
    options = parse(arguments)
    level = cpu_isa.best_level(ROOT / "build" / "cpu_isa.json")
    if level:  # before oneDNN's first use, which reads it
        os.environ.setdefault(cpu_isa.VARIABLE, level)
    from benchmarks.run import Plan, list_rows, run

    plan = Plan(
        options.filter,
        options.device,
        options.quick,
        options.minutes * 60,
        options.out,
        options.resume,
    )
    if options.list:
        return list_rows(plan)
    return run(plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
