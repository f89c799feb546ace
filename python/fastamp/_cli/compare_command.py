# SPDX-License-Identifier: Apache-2.0
"""Finds where two runs part: ``python -m fastamp compare A B``."""

from __future__ import annotations

import sys

from fastamp._cli.output_file import OutputFile, json_option, print_report
from fastamp._debug.compare.comparison import compare_records
from fastamp._debug.compare.record import read_record

__all__ = ["main"]

USAGE = """\
usage: python -m fastamp compare [--json FILE] FIRST SECOND

Compares two records of a training step and names the first op, gradient or update at which the
runs are apart, and rounding does not explain it. A run writes its record with
    python -m fastamp --record FILE [--at-step N] PROGRAM
Runs may differ in dtypes, numbers of ranks and versions of torch. The exit status is 0 if rounding
explains all differences, 1 if not, 2 if a record cannot be read. --json writes what was found as
data as well; - prints that alone.
"""


def main(arguments: list[str]) -> None:
    """Runs the command; an exit code is raised as SystemExit."""
    if arguments in (["--help"], ["-h"]):
        print(USAGE, end="")
        return
    target, files = json_option(arguments)
    if len(files) != 2:
        sys.stderr.write(f"{USAGE}python -m fastamp compare: expected two files\n")
        sys.exit(2)
    try:
        output = None if target is None else OutputFile(target)
        first, second = (read_record(path) for path in files)
        comparison = compare_records(first, second)
        print_report(comparison, comparison.to_json(), output)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        sys.stderr.write(f"python -m fastamp compare: {error}\n")
        sys.exit(2)
    sys.exit(0 if comparison.divergence is None else 1)
