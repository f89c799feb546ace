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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from run_tests import ctest_command
from simulated_cuda import check_torch, is_built, libraries
from tracked_files import ROOT

CTEST_SUMMARY = re.compile(r"^(\d+% tests passed.*|No tests were found.*)$")
DEMO_SUMMARY = re.compile(r"^All numbers: .*")
PYTEST_SUMMARY = re.compile(r"^=+ .*\b(passed|failed|error|errors|skipped|no tests ran)\b.* =+$")

# Host code that hands memory to a device, or takes it back: what late work finds faults in.
LATE = (
    "tests/python/ops",
    "tests/python/scaler",
    "tests/python/optim",
    "tests/python/graphed",
    "tests/python/autocast/test_cast_cache.py",
)


@dataclass(frozen=True)
class Pass:
    """One run on the device.

    Attributes:
        name: What it is called in the summary.
        options: Of the launcher, tools/simulated_cuda.py.
        paths: What pytest runs, and options of it; empty for the C++ tests.
        marker: Which tests of them.
        demo: Whether it is the demo instead.
    """

    name: str
    options: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    marker: str = "cuda"
    demo: bool = False


FLOAT8 = ("tests/python/simulated_cuda/test_float8.py",)

PASSES = (
    Pass("the device's own tests", paths=("tests/python/simulated_cuda",), marker="simulated"),
    Pass("C++"),
    Pass("Python", paths=("tests/python", "--ignore=tests/python/thirdparty")),
    # On several devices some libraries copy models by NCCL, which is not simulated.
    Pass("third parties", ("--devices", "1"), ("tests/python/thirdparty",)),
    Pass("Python, late", ("--late",), LATE),
    *(
        Pass(f"fp8 at {number / 10}", ("--capability", str(number)), FLOAT8, "simulated")
        for number in (80, 89, 100)
    ),
    Pass("demo", demo=True),
)


def command_of(one: Pass, build_dir: Path) -> list[str]:
    """Returns the command of a pass."""
    launcher = [sys.executable, str(ROOT / "tools" / "simulated_cuda.py")]
    launcher += ["--build-dir", str(build_dir), *one.options, "--"]
    if one.demo:
        demo = [sys.executable, str(ROOT / "tools" / "demo.py"), "--iters", "20"]
        return [*launcher, *demo, "--folder", str(build_dir / "simulated_demo")]
    if not one.paths:
        return [*launcher, *ctest_command(build_dir, label="cuda")]
    pytest = [sys.executable, "-m", "pytest", "-m", one.marker, "-n", "0", *one.paths]
    return [*launcher, *pytest]


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
        usual = PYTEST_SUMMARY if one.paths else CTEST_SUMMARY
        summary = DEMO_SUMMARY if one.demo else usual
        status, line = run(command_of(one, build_dir), summary)
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
