# SPDX-License-Identifier: Apache-2.0
"""Overflow reports of several ranks as one: ``python -m fastamp merge FILE ...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fastamp._scaler.rank_reports import merged
from fastamp._scaler.reports import report_from_dict

__all__ = ["main"]

USAGE = """\
usage: python -m fastamp merge FILE ...

Prints as one table what scaler.overflow_report(model).write("overflow.json") has written on each
rank, overflow.rank0.json and so on: of the last step that a rank has skipped.
"""


def main(arguments: list[str]) -> None:
    """Runs the command; an exit code is raised as SystemExit."""
    if arguments in (["--help"], ["-h"]):
        print(USAGE, end="")
        return
    if not arguments:
        sys.stderr.write(f"{USAGE}python -m fastamp merge: expected files, got none\n")
        sys.exit(2)
    reports = []
    for name in arguments:
        try:
            data = json.loads(Path(name).read_text(encoding="utf-8"))
            reports.append(report_from_dict(data, "merge", name))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"python -m fastamp merge: {name}: {error}\n")
            sys.exit(2)
    print(merged(reports))
