"""The rows that C++ programs measure with google-benchmark, benchmarks named ``row|candidate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.goals import at_least_times, at_most, not_slower
from benchmarks.harness import Effort, Goal, Result, judge

COUNTS = (1, 10, 100, 1000, 10_000, 100_000)
CURVE = "C++: unscale_ + update, n x 16"
TARGET = "fastamp_benchmarks"
HOW_TO_GET_THEM = (
    "C++ rows: not measured: google-benchmark was not found when the build was configured "
    "(Debian: apt-get install libbenchmark-dev), or there is no build (make build)"
)

# By program: its rows and what the project wants of them.
PROGRAMS: dict[str, dict[str, Goal | None]] = {
    "region": {"C++: region": at_most(100)},
    "ops": {
        "C++: mm 8x8, bf16 (no cast)": not_slower(),
        "C++: mm 8x8, bf16 x cached weight": not_slower(),
        "C++: mm 8x8, fp32 x cached weight": at_least_times(1.4),
        "C++: mm 8x8, fp32 x frozen fp32": at_least_times(1.7),
    },
    "cast_cache": {"C++: cached weight lookup": at_most(25)},
    "scaler": {f"C++: unscale_ + update, {count} x 16": not_slower() for count in COUNTS},
}


# The clock of the one thread that does the work: other programs' turns do not count.
CLOCKS = {"scaler": "real_time"}
CLOCK = "cpu_time"


def row_names() -> list[str]:
    """Returns the names of all C++ rows."""
    return [row for rows in PROGRAMS.values() for row in rows]


def build() -> Path | None:
    """Builds the programs; returns their folder, None where they cannot be built."""
    build_dir = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
    beside = Path(sys.executable).parent / "cmake"
    command = [str(beside) if beside.exists() else "cmake", "--build", str(build_dir)]
    try:
        subprocess.run([*command, "--target", TARGET], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return build_dir / "benchmarks"


def _run(program: Path, rows: list[str], effort: Effort) -> list[dict[str, Any]]:
    # Each repetition makes its tensors anew: 100 000 of them take longer than what is measured.
    most = 41 if any("100000" in row for row in rows) else effort.repeats
    repetitions = min(most, max(effort.least_repeats, round(effort.row_seconds * 40)))
    chosen = "|".join(f"^{_escape(row)}[|]" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [
            str(program),
            f"--benchmark_filter={chosen}",
            f"--benchmark_repetitions={repetitions}",
            f"--benchmark_min_time={max(effort.block_seconds, 2e-3)}",
            "--benchmark_enable_random_interleaving=true",
            f"--benchmark_out={output}",
            "--benchmark_out_format=json",
        ]
        subprocess.run(command, capture_output=True, check=True)
        found: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    return found


def _escape(name: str) -> str:
    """Returns a POSIX extended regular expression for a name."""
    return "".join(f"[{char}]" if char in "+()." else char for char in name)


def _results(program: str, rows: list[str], runs: list[dict[str, Any]]) -> Iterator[Result]:
    clock = CLOCKS.get(program, CLOCK)
    for row in rows:
        result = Result(row, 0, {}, group="C++")
        for run in runs:
            name, _, candidate = run["run_name"].partition("|")
            if name == row and run["run_type"] == "iteration":
                result.samples.setdefault(candidate, []).append(run[clock])
                result.calls_per_block = run["iterations"]
        if row.startswith(CURVE.split(",")[0]):
            result.curve = (CURVE, float(row.split()[-3]))
        judge(result, PROGRAMS[program][row])
        yield result


def measure(wanted: list[str], effort: Effort) -> tuple[list[Result], list[str]]:
    """Builds and runs the programs; returns results, and notes on what could not be measured."""
    if not wanted:
        return [], []
    folder = build()
    if folder is None:
        return [], [HOW_TO_GET_THEM]
    results = []
    for program, goals in PROGRAMS.items():
        rows = [row for row in goals if row in wanted]
        if rows:
            runs = _run(folder / f"fastamp_bench_{program}", rows, effort)
            results += list(_results(program, rows, runs))
    notes = [
        "C++ rows, torch.amp: its ops and state called by hand; LibTorch has no guard or scaler"
    ]
    return results, notes
