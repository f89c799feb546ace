"""The C++ guard, measured by a C++ program with google-benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.harness import BASELINE, OURS, Effort, Result, at_most, judge

NAME = "C++: region"
CANDIDATES = {"torch_state_by_hand": BASELINE, "fastamp_guard": OURS}
GOAL = at_most(100)
HOW_TO_GET_IT = (
    f"{NAME}: not measured: google-benchmark was not found when the build was configured "
    "(Debian: apt-get install libbenchmark-dev), or there is no build (make build)"
)


def _build() -> Path | None:
    build_dir = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
    beside = Path(sys.executable).parent / "cmake"
    target = "fastamp_bench_guard"
    command = [str(beside) if beside.exists() else "cmake", "--build", str(build_dir)]
    try:
        subprocess.run([*command, "--target", target], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return build_dir / "benchmarks" / target


def measure_guard(effort: Effort) -> Result | None:
    """Builds and runs the program; None where it cannot be built."""
    program = _build()
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "guard.json"
        command = [
            str(program),
            f"--benchmark_repetitions={effort.repeats}",
            f"--benchmark_min_time={max(effort.block_seconds, 2e-3)}",
            "--benchmark_enable_random_interleaving=true",
            f"--benchmark_out={output}",
            "--benchmark_out_format=json",
        ]
        subprocess.run(command, capture_output=True, check=True)
        document = json.loads(output.read_text(encoding="utf-8"))
    samples: dict[str, list[float]] = {BASELINE: [], OURS: []}
    calls = 0
    for run in document["benchmarks"]:
        if run["run_type"] == "iteration":
            samples[CANDIDATES[run["run_name"]]].append(run["cpu_time"])
            calls = run["iterations"]
    result = Result(NAME, calls, samples)
    result.notes.append("torch.amp: its state set by hand from C++, there is no guard of torch's")
    judge(result, GOAL)
    return result
