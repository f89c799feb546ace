# SPDX-License-Identifier: Apache-2.0
"""Runs what needs a CUDA device on the simulated one: `make simcuda`.

Each pass runs, whatever those before it found; the last lines are their summaries. The results are
called simulated: docs/cuda.md says what they prove.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from run_tests import ctest_command
from simulated_cuda import check_torch, is_built, libraries
from tracked_files import ROOT

CTEST_SUMMARY = re.compile(r"^(\d+% tests passed.*|No tests were found.*)$")
PYTEST_SUMMARY = re.compile(r"^=+ .*\b(passed|failed|error|errors|skipped|no tests ran)\b.* =+$")

# Host code that hands memory to a device, or takes it back: what late work finds faults in.
LATE = (
    "tests/python/ops",
    "tests/python/scaler",
    "tests/python/optim",
    "tests/python/graphed",
    "tests/python/autocast/test_cast_cache.py",
)


# Where it can matter whether there is a device: defaults, what is installed, tools that look at
# tensors, steps, programs of the guides. What else there is never asks: casts and kernels for the
# CPU, builds, packages, the tools.
BESIDE = (
    "tests/python/debugging",
    "tests/python/distributed",
    "tests/python/dropin",
    "tests/python/graphed",
    "tests/python/inference",
    "tests/python/ops",
    "tests/python/scaler",
    "tests/python/trace",
    "tests/python/test_",
)
FLOAT8 = ("tests/python/simulated_cuda/test_float8.py",)
Command = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Pass:
    """One run on the device.

    Attributes:
        name: What it is called in the summary.
        command: Returns what runs, given the build folder.
        options: Of the launcher, tools/simulated_cuda.py.
        summary: The line of its output that tells what came of it: the last that matches.
    """

    name: str
    command: Command
    options: tuple[str, ...] = ()
    summary: re.Pattern[str] = PYTEST_SUMMARY


def _pytest(*paths: str, marker: str = "cuda") -> Command:
    words = [sys.executable, "-m", "pytest", "-m", marker, "-n", "0", *paths]
    return lambda _: words


def _program(tool: str, *words: str, folder: str = "") -> Command:
    """One of tools/, with the build folder, or with a folder in it."""

    def command(build_dir: Path) -> list[str]:
        place = ["--folder", str(build_dir / folder)] if folder else ["--build-dir", str(build_dir)]
        return [sys.executable, str(ROOT / "tools" / tool), *place, *words]

    return command


PASSES = (
    Pass("the device's own tests", _pytest("tests/python/simulated_cuda", marker="simulated")),
    Pass("C++", lambda build_dir: ctest_command(build_dir, label="cuda"), summary=CTEST_SUMMARY),
    Pass("Python", _pytest("tests/python", "--ignore=tests/python/thirdparty")),
    Pass("third parties", _pytest("tests/python/thirdparty")),
    Pass("Python, late", _pytest(*LATE), ("--late",)),
    *(
        Pass(
            f"fp8 at {number / 10}",
            _pytest(*FLOAT8, marker="simulated"),
            ("--capability", str(number)),
        )
        for number in (80, 89, 100)
    ),
    Pass("beside a device", _program("run_tests.py", "--beside-cuda", *BESIDE)),
    Pass(
        "demo",
        _program("demo.py", "--iters", "20", folder="simulated_demo"),
        summary=re.compile(r"^All numbers: .*"),
    ),
    Pass("make gpu", _program("simulated_gpu.py"), summary=re.compile(r"^\d+ stages, .*")),
)


def command_of(one: Pass, build_dir: Path) -> list[str]:
    """Returns the command of a pass."""
    launcher = [sys.executable, str(ROOT / "tools" / "simulated_cuda.py")]
    return [*launcher, "--build-dir", str(build_dir), *one.options, "--", *one.command(build_dir)]


def run(command: list[str], summary: re.Pattern[str]) -> tuple[int, str]:
    """Runs a command, passes its output on, and picks its last line that matches.

    Returns:
        The exit status, and the line, or a sentence that says that there was none.
    """
    found = "ended without a summary"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if summary.match(line.strip()):
                found = line.strip()
    return process.returncode, found


def run_passes(passes: Sequence[Pass], build_dir: Path) -> int:
    """Runs them all; returns how many failed."""
    lines = []
    failed = 0
    for one in passes:
        status, line = run(command_of(one, build_dir), one.summary)
        failed += status != 0
        lines.append(f"simulated, {one.name}: {line.strip('= ')}")
    print("\n".join(lines))
    return failed


def main() -> int:
    """Returns 0 if all passes passed.

    Raises:
        RuntimeError: The device is not built, or does not go with torch.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--only", default="", help="a part of the name of the passes to run")
    options = parser.parse_args()
    build_dir = options.build_dir.resolve()
    if not is_built(build_dir):
        raise RuntimeError(f"{build_dir} has no simulated device: builds with CUDA on Linux have")
    check_torch(libraries(build_dir)[0])
    return int(run_passes([one for one in PASSES if options.only in one.name], build_dir) != 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"fastamp: {error}")
