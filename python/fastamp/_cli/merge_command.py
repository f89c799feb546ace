# SPDX-License-Identifier: Apache-2.0
"""Overflow reports of several ranks as one: ``python -m fastamp merge FILE ...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fastamp._cli.output_file import OutputFile, json_option, print_report
from fastamp._debug.report import json_of
from fastamp._scaler.rank_reports import merged
from fastamp._scaler.reports import report_from_dict

__all__ = ["main"]

USAGE = """\
usage: python -m fastamp merge [--json FILE] FILE ...

Prints as one table what scaler.overflow_report(model).write("overflow.json") has written on each
rank, overflow.rank0.json and so on: of the last step that a rank has skipped. --json writes that as
data as well; - prints it alone. The exit status is 2 if a file cannot be read, else 0.
"""


def main(arguments: list[str]) -> None:
    """Runs the command; an exit code is raised as SystemExit."""
    if arguments in (["--help"], ["-h"]):
        print(USAGE, end="")
        return
    target, files = json_option(arguments)
    if not files:
        sys.stderr.write(f"{USAGE}python -m fastamp merge: expected files, got none\n")
        sys.exit(2)
    reports = []
    for name in files:
        try:
            data = json.loads(Path(name).read_text(encoding="utf-8"))
            reports.append(report_from_dict(data, "merge", name))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"python -m fastamp merge: {name}: {error}\n")
            sys.exit(2)
    report = merged(reports)
    try:
        output = None if target is None else OutputFile(target)
        print_report(report, json_of("merge", report.as_dict()), output)
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stderr.write(f"python -m fastamp merge: {error}\n")
        sys.exit(2)
