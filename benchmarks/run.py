# SPDX-License-Identifier: Apache-2.0
"""Runs the rows with a progress bar, saves the raw results as they come and prints the table."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import cpp_programs, results_file
from benchmarks.budget import QUICK, Budget, Effort
from benchmarks.environment import ROOT, describe, load
from benchmarks.harness import Result, Row, measure
from benchmarks.rows import all_rows
from benchmarks.table import summary, text_table

# A run may take this many times the requested time, if promised repeats need it. A quick one, which
# is for a first look, takes longer on a busy machine rather than leaving rows out.
STRETCH, QUICK_STRETCH = 1.2, 6.0


@dataclass(frozen=True)
class Plan:
    """Selection of what to run.

    Attributes:
        pattern: Only rows whose name matches.
        device: ``cpu``, ``cuda``, ``all``, or None for what is there.
        quick: Fewer repeats.
        seconds: About how long all rows may take.
        out: Where raw results go, or None for the usual place.
        resume: Keep the rows that ``out`` holds already, if this machine and revision made them.
    """

    pattern: re.Pattern[str]
    device: str | None = None
    quick: bool = False
    seconds: float = 480.0
    out: Path | None = None
    resume: bool = False

    def devices(self) -> list[str]:
        """Returns the devices whose rows are wanted."""
        if self.device is None:
            return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return ["cpu", "cuda"] if self.device == "all" else [self.device]

    def rows(self) -> list[Row]:
        """Returns the rows to measure."""
        return [row for row in all_rows(self.devices()) if self.pattern.search(row.name)]

    def programs(self) -> list[str]:
        """Returns the names of the C++ rows to measure; they run on the CPU."""
        wanted = cpp_programs.row_names() if "cpu" in self.devices() else []
        return [name for name in wanted if self.pattern.search(name)]

    def effort(self) -> str:
        """Returns what a reader should know of a run's thoroughness."""
        return f"{'quick, ' if self.quick else ''}{self.seconds / 60:.2g} minutes"

    def limit(self) -> float:
        """Returns the seconds after which no row begins."""
        return self.seconds * (QUICK_STRETCH if self.quick else STRETCH)

    def base(self) -> Effort:
        """Returns the effort for a row, of which the budget decides the seconds."""
        return QUICK if self.quick else Effort()


@dataclass
class Findings:
    """Outcome of a run: results, notes for rows that could not be measured, failures."""

    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: int = 0


def list_rows(plan: Plan) -> int:
    """Prints the names of the rows that match."""
    for name in (*(row.name for row in plan.rows()), *plan.programs()):
        print(name)
    return 0


def _measure_row(row: Row, effort: Effort, findings: Findings) -> None:
    try:
        findings.results.append(measure(row, effort))
    except ImportError as error:
        findings.notes.append(f"{row.name}: not measured: {error}")
    except Exception as error:  # the rows after it still count
        findings.failed += 1
        findings.notes.append(f"{row.name}: FAILED: {type(error).__name__}: {error}")
    if row.device == "cuda":
        torch.cuda.empty_cache()


def _progress(total: int) -> tqdm[Any]:
    terminal = sys.stderr.isatty()
    size = {} if terminal else {"ncols": 78}
    return tqdm(total=total, unit="row", mininterval=0.1 if terminal else 5, **size)


def _kept(plan: Plan, environment: dict[str, str], out: Path) -> list[Result]:
    """Returns the rows of the plan that need not be measured again; the environment says so."""
    if not plan.resume or not out.is_file():
        return []
    before, results, _ = results_file.load(out)
    for name in results_file.MACHINE:
        if before.get(name) != environment.get(name):
            print(f"{out}: {name} was {before.get(name)}, is {environment.get(name)}: all anew")
            return []
    wanted = {*(row.name for row in plan.rows()), *plan.programs()}
    kept = [result for result in results if result.name in wanted]
    environment["resumed"] = f"{len(kept)} rows of {before.get('date', 'an unknown date')}"
    return kept


def _measure_programs(
    programs: list[str],
    effort_for: Callable[[float], Effort],
    folder: Path | None,
    bar: tqdm[Any],
    findings: Findings,
) -> None:
    for program, rows in cpp_programs.chosen(programs):
        bar.set_description(f"{'C++ ' + program:34}")
        effort = effort_for(cpp_programs.weight(rows))
        if folder is not None and not cpp_programs.path_of(folder, program).exists():
            # It borrows the headers of the emulated tests, which need Catch2.
            findings.notes.append(f"C++ {program}: not measured: a build without tests has it not")
        elif folder is not None:
            try:
                findings.results += cpp_programs.measure(folder, program, rows, effort)
            except Exception as error:  # the rows after it still count
                findings.failed += len(rows)
                findings.notes.append(f"C++ {program}: FAILED: {type(error).__name__}: {error}")
        bar.update(len(rows))


def _weight(rows: list[Row], programs: list[str]) -> float:
    parts = cpp_programs.chosen(programs)
    return sum(row.weight for row in rows) + sum(cpp_programs.weight(part) for _, part in parts)


def _save(out: Path, environment: dict[str, str], findings: Findings) -> None:
    results_file.save(out, environment, findings.results, findings.notes)


def measure_all(plan: Plan, environment: dict[str, str], out: Path) -> Findings:
    """Measures all rows of a plan; the file is written after each of them.

    Light rows come first: the heavy ones get the time that these leave of their share.
    """
    names = [*(row.name for row in plan.rows()), *plan.programs()]
    findings = Findings(results=_kept(plan, environment, out))
    done = {result.name for result in findings.results}
    rows = [row for row in plan.rows() if row.name not in done]
    programs = [name for name in plan.programs() if name not in done]
    folder, note = cpp_programs.build() if programs else (None, "")
    findings.notes += [note] if note else []
    # Rows that need not be measured again leave out their part of the time.
    weight = _weight(rows, programs)
    share = weight / _weight(plan.rows(), plan.programs())
    budget = Budget(share * plan.seconds, share * plan.limit(), weight)
    try:
        with _progress(len(rows) + len(programs)) as bar:
            effort_for = partial(budget.effort, plan.base())
            _measure_programs(programs, effort_for, folder, bar, findings)
            for row in sorted(rows, key=lambda row: row.weight):
                bar.set_description(f"{row.name[:34]:34}")
                if budget.is_over():
                    findings.failed += 1
                    findings.notes.append(f"{row.name}: NOT MEASURED: the time was over")
                else:
                    _measure_row(row, effort_for(row.weight), findings)
                bar.update()
                _save(out, environment, findings)
    finally:
        findings.results.sort(key=lambda result: names.index(result.name))
        environment["load_at_end"] = load()
        _save(out, environment, findings)
    return findings


def _place(plan: Plan, environment: dict[str, str]) -> Path:
    if plan.out is not None:
        return plan.out
    partial = plan.quick or bool(plan.pattern.pattern) or plan.device is not None
    default = results_file.default_path(environment)
    return ROOT / "build" / "bench" / "partial.json" if partial else default


def run(plan: Plan) -> int:
    """Measures the rows that match and returns the exit status."""
    if not plan.rows() and not plan.programs():
        print(f"no row matches {plan.pattern.pattern!r}; --list names them", file=sys.stderr)
        return 2
    environment = {**describe(), "effort": plan.effort()}
    for name, value in environment.items():
        print(f"{name:20}{value}")
    if environment["gpu"] == "none":
        if plan.device in ("cuda", "all"):
            print(f"--device {plan.device}: no CUDA GPU here", file=sys.stderr)
            return 2
        print("no CUDA GPU here: CPU rows only")
    sys.stdout.flush()
    # What was measured is saved when the run is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start, out = time.monotonic(), _place(plan, environment)
    findings = measure_all(plan, environment, out)
    if findings.results:
        print(f"\n{text_table(findings.results)}\n\n{summary(findings.results)}")
    print("\n".join(findings.notes), end="\n" if findings.notes else "")
    print(f"{time.monotonic() - start:.0f} s; raw results: {os.path.relpath(out)}")
    return int(findings.failed > 0)
