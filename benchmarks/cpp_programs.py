# SPDX-License-Identifier: Apache-2.0
"""The rows that C++ programs measure with google-benchmark, benchmarks named ``row|candidate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.budget import Effort
from benchmarks.environment import ROOT
from benchmarks.goals import at_least_times, at_most, not_slower
from benchmarks.harness import Goal, Result, judge, note_first_samples, note_repeats

COUNTS = (1, 10, 100, 1000, 10_000, 100_000)
CURVE = "C++: unscale_ + update, n x 16"
TARGET = "fastamp_benchmarks"
HOW_TO_GET_THEM = (
    "C++ rows: not measured: google-benchmark was not found when the build was configured "
    "(Debian: apt-get install libbenchmark-dev), or there is no build (make build)"
)
NOTE = "C++ rows, torch.amp: its ops and state called by hand; LibTorch has no guard or scaler"
# Each repetition makes its tensors anew: making this many takes longer than what is measured.
HEAVY, HEAVY_WEIGHT = "100000", 8.0
START_WEIGHT = 4.0  # of a program: loading torch three times

# By program: its rows and what the project wants of them.
PROGRAMS: dict[str, dict[str, Goal | None]] = {
    "region": {"C++: region": at_most(100)},
    "ops": {
        "C++: mm 8x8, bf16 (no cast)": not_slower(),
        "C++: mm 8x8, bf16 x cached weight": not_slower(),
        "C++: mm 8x8, fp32 x cached weight": at_least_times(1.4),
        "C++: mm 8x8, fp32 x frozen fp32": at_least_times(1.7),
        "C++: torch::nn::Linear 256x256, fp32": at_least_times(1.5),
    },
    "cast_cache": {"C++: cached weight lookup": at_most(25)},
    "scaler": {f"C++: unscale_ + update, {count} x 16": not_slower() for count in COUNTS},
    "optim": {
        "C++: step + update, SGD, 10 x 16": not_slower(),
        "C++: step + update, SGD, 1000 x 16": at_least_times(3),
        "C++: step + update, AdamW, 10 x 16": not_slower(),
        "C++: step + update, AdamW, 1000 x 16": not_slower(),
        "C++: clip + step + update, AdamW, 10 x 16": not_slower(),
        "C++: clip + step + update, AdamW, 1000 x 16": not_slower(),
    },
    # Without torch.amp's side: the host's part of its step cannot be had without a GPU.
    "step_host": {
        "C++: host's part of a CUDA step, AdamW, 150 tensors": None,
        "C++: host's part of a CUDA step, AdamW, 1000 tensors": None,
        "C++: host's part of a CUDA step, AdamW, 10000 tensors": at_most(3e6),
    },
}


# The clock of the one thread that does the work: other programs' turns do not count.
CLOCKS = {"scaler": "real_time", "optim": "real_time"}
CLOCK = "cpu_time"


def row_names() -> list[str]:
    """Returns the names of all C++ rows."""
    return [row for rows in PROGRAMS.values() for row in rows]


def chosen(wanted: list[str]) -> list[tuple[str, list[str]]]:
    """Returns programs with the rows that they measure in one go; heavy rows are on their own."""
    found = []
    for program, goals in PROGRAMS.items():
        rows = [row for row in goals if row in wanted]
        light = [row for row in rows if HEAVY not in row]
        found += [(program, part) for part in (light, [r for r in rows if r not in light]) if part]
    return found


def weight(rows: list[str]) -> float:
    """Returns the share of a run's time that rows have which are measured in one go."""
    return START_WEIGHT + sum(HEAVY_WEIGHT if HEAVY in row else 1.0 for row in rows)


def build() -> tuple[Path | None, str]:
    """Builds the programs; returns their folder and a note, which says why if there is none."""
    build_dir = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
    beside = Path(sys.executable).parent / "cmake"
    command = [str(beside) if beside.exists() else "cmake", "--build", str(build_dir)]
    try:
        done = subprocess.run(
            [*command, "--target", TARGET], capture_output=True, text=True, check=False
        )
    except OSError:
        return None, HOW_TO_GET_THEM
    if done.returncode == 0:
        return build_dir / "benchmarks", NOTE
    output = done.stdout + done.stderr
    absent = ("unknown target", "No rule to make target")  # as ninja and make say it
    if not build_dir.exists() or any(words in output for words in absent):
        return None, HOW_TO_GET_THEM
    return None, f"C++ rows: not measured: they do not compile:\n{output[-2000:]}"


def _run(
    program: Path, rows: list[str], block_seconds: float, repetitions: int
) -> list[dict[str, Any]]:
    chosen_rows = "|".join(f"^{_escape(row)}[|]" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [
            str(program),
            f"--benchmark_filter={chosen_rows}",
            f"--benchmark_repetitions={repetitions}",
            f"--benchmark_min_time={max(block_seconds, 2e-3)}",
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


def _repetitions(path: Path, rows: list[str], effort: Effort) -> int:
    """Returns how many repetitions there is time for; runs the program once to find out."""
    if effort.quick:
        return effort.promised_repeats
    start = time.perf_counter()
    subprocess.run([str(path), "--benchmark_list_tests"], capture_output=True, check=True)
    loading = time.perf_counter() - start
    _run(path, rows, effort.block_seconds, 1)
    spent = time.perf_counter() - start
    return effort.repeats_for(max(spent - 2 * loading, 1e-3), spent + loading)


def path_of(folder: Path, program: str) -> Path:
    """Returns where a program is, if it was built."""
    return folder / f"fastamp_bench_{program}"


def measure(folder: Path, program: str, rows: list[str], effort: Effort) -> list[Result]:
    """Runs a program with the repetitions that there is time for.

    Raises:
        subprocess.CalledProcessError: The program failed.
    """
    path, start = path_of(folder, program), time.perf_counter()
    runs = _run(path, rows, effort.block_seconds, _repetitions(path, rows, effort))
    results = list(_results(program, rows, runs))
    for result in results:
        result.seconds = round((time.perf_counter() - start) / len(rows), 2)
        note_repeats(result, effort)
        note_first_samples(result)
    return results
