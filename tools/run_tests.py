# SPDX-License-Identifier: Apache-2.0
"""Runs ctest and then pytest, both always, and ends with both runners' own summary lines."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from patience import patience

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2  # more would each have too few threads for what tests threads
CTEST_SECONDS = 600  # after which a C++ program counts as hanging, on two idle cores
CTEST_SUMMARY = re.compile(r"^(\d+% tests passed.*|No tests were found.*)$")
PYTEST_SUMMARY = re.compile(r"^=+ .*\b(passed|failed|error|errors|skipped|no tests ran)\b.* =+$")


def run(command: list[str], summary: re.Pattern[str]) -> tuple[int, str]:
    """Runs a command, passes its output on, and picks its last line that matches.

    Returns:
        The exit status, and the line, or a sentence that says that there was none.
    """
    found = f"{Path(command[0]).name}: ended without a summary"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if summary.match(line.strip()):
                found = line.strip()
    return process.returncode, found


def ctest_command(build_dir: Path, label: str = "", processes: int = 1) -> list[str]:
    """Returns the ctest call, for tests with a label if one is given; ctest lies beside cmake."""
    beside = shutil.which("ctest", path=str(Path(sys.executable).parent))
    ctest = beside or shutil.which("ctest")
    if ctest is None:
        raise SystemExit("ctest is not installed: it comes with cmake")
    selection = ["-L", label] if label else []
    return [
        ctest,
        "--test-dir",
        str(build_dir),
        "--output-on-failure",
        "--no-tests=error",
        "--timeout",
        str(round(patience(CTEST_SECONDS))),
        "--parallel",
        str(processes),
        *selection,
    ]


def side_by_side() -> list[str]:
    """Returns pytest's options for two processes, each with whole files; none without xdist."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["--numprocesses", str(PROCESSES), "--dist", "loadfile"]


def gpu_name() -> str:
    """Returns the GPU that torch sees, or "" where there is none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def main() -> int:
    """Returns 0 if both runners passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--cuda", action="store_true", help="only tests that need a GPU")
    parser.add_argument("--emulated", action="store_true", help="only emulated kernels, all cases")
    options = parser.parse_args()
    if options.emulated:
        os.environ["FASTAMP_EMULATE_LONG"] = "1"
        return run(ctest_command(options.build_dir, "emulated", PROCESSES), CTEST_SUMMARY)[0]
    gpu = gpu_name()
    if options.cuda and not gpu:
        raise SystemExit("no CUDA GPU here: nothing was tested")
    print(f"GPU: {gpu}" if gpu else "no CUDA GPU here: tests that need one are skipped", flush=True)
    pytest = [sys.executable, "-m", "pytest"]
    if options.cuda:
        pytest += ["-m", "cuda"]
    if not gpu:  # whose memory and time tests count
        pytest += side_by_side()
        # Else threads that wait spin on the cores that the other process needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    label = "cuda" if options.cuda else ""
    command = ctest_command(options.build_dir, label, 1 if gpu else PROCESSES)
    ctest_status, ctest_line = run(command, CTEST_SUMMARY)
    pytest_status, pytest_line = run(pytest, PYTEST_SUMMARY)
    print(f"\n{ctest_line}\n{pytest_line}", flush=True)
    return int(ctest_status != 0 or pytest_status != 0)


if __name__ == "__main__":
    raise SystemExit(main())
