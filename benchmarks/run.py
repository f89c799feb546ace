"""Runs the rows with a progress bar, saves the raw results as they come and prints the table."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import cpp_programs, results_file
from benchmarks.environment import ROOT, describe, load
from benchmarks.harness import Effort, Result, Row, measure
from benchmarks.rows import all_rows
from benchmarks.table import summary, text_table

QUICK = Effort(repeats=31, block_seconds=3e-4, least_repeats=7)
# Part of the time that goes into making tensors and models, warming up and counting.
OVERHEAD = 0.3
SAVE_EVERY = 20.0


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        pattern: Only rows whose name matches.
        device: ``cpu``, ``cuda``, ``all``, or None for what is there.
        quick: Fewer repeats.
        seconds: About how long all rows may take.
        out: Where raw results go, or None for the usual place.
    """

    pattern: re.Pattern[str]
    device: str | None = None
    quick: bool = False
    seconds: float = 540.0
    out: Path | None = None

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

    def effort(self, seconds_left: float, weight_left: float) -> Effort:
        """Returns the effort that spends the time that is left on rows of so much weight."""
        base = QUICK if self.quick else Effort()
        spend = max(0.0, seconds_left) * (1 - OVERHEAD)
        return replace(base, row_seconds=min(10.0, spend / weight_left))


@dataclass
class Findings:
    """What a run found: results, notes for rows that could not be measured, failures."""

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


def measure_all(plan: Plan, environment: dict[str, str], out: Path) -> Findings:
    """Measures all rows of a plan; the file is written now and then, and at the end.

    Heavy rows come first: what they take more than their share, the others have less of.
    """
    rows, programs = plan.rows(), plan.programs()
    weight = sum(row.weight for row in rows) + len(programs)
    findings, saved = Findings(), time.monotonic()
    end = saved + plan.seconds
    try:
        with _progress(len(rows) + len(programs)) as bar:
            for row in sorted(rows, key=lambda row: -row.weight):
                bar.set_description(f"{row.name[:34]:34}")
                _measure_row(row, plan.effort(end - time.monotonic(), weight), findings)
                weight -= row.weight
                bar.update()
                if time.monotonic() - saved > SAVE_EVERY:
                    results_file.save(out, environment, findings.results, findings.notes)
                    saved = time.monotonic()
            bar.set_description(f"{'C++':34}")
            effort = plan.effort(end - time.monotonic(), max(weight, 1))
            results, notes = cpp_programs.measure(programs, effort)
            bar.update(len(programs))
            places = {row.name: place for place, row in enumerate(rows)}
            findings.results = sorted(findings.results, key=lambda r: places[r.name]) + results
            findings.notes += notes
    finally:
        environment["load_at_end"] = load()
        results_file.save(out, environment, findings.results, findings.notes)
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
    environment = describe()
    for name, value in environment.items():
        print(f"{name:20}{value}")
    if environment["gpu"] == "none":
        if plan.device in ("cuda", "all"):
            print(f"--device {plan.device}: no CUDA GPU here", file=sys.stderr)
            return 2
        print("no CUDA GPU here: CPU rows only")
    sys.stdout.flush()
    # What was measured until the run is ended from outside is saved.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start, out = time.monotonic(), _place(plan, environment)
    findings = measure_all(plan, environment, out)
    if findings.results:
        print(f"\n{text_table(findings.results)}\n\n{summary(findings.results)}")
    print("\n".join(findings.notes), end="\n" if findings.notes else "")
    print(f"{time.monotonic() - start:.0f} s; raw results: {os.path.relpath(out)}")
    return int(findings.failed > 0)
