# SPDX-License-Identifier: Apache-2.0
"""Runs what needs a CUDA device on the simulated one, and what may see one: `make simcuda`.

Two passes run at a time, whatever others found. Each has a log in the build folder; the last lines
are their summaries. The results are called simulated: docs/cuda.md says what they prove.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from run_tests import PROCESSES
from simulated_cuda import check_torch, is_built, libraries
from tracked_files import ROOT

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
# CPU, builds, packages, the tools. Files that take long are left out here.
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
MOST_SECONDS = "12"  # of CPU time, of a file beside a device
FLOAT8 = ("tests/python/simulated_cuda/test_float8.py",)
Command = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Pass:
    """One run on the device.

    Attributes:
        name: What it is called in the summary.
        command: Returns what runs, given the build folder.
        options: Of the launcher, tools/simulated_cuda.py.
        summary: The line of its output that shows what came of it: the last that matches.
        is_queue: Whether it runs as many processes as there are cores.
    """

    name: str
    command: Command
    options: tuple[str, ...] = ()
    summary: re.Pattern[str] = PYTEST_SUMMARY
    is_queue: bool = False


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
    # As long as half of the others. A stage of it runs the C++ tests that need a device.
    Pass("make gpu", _program("simulated_gpu.py"), summary=re.compile(r"^\d+ stages, .*")),
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
    Pass(
        "beside a device",
        _program("run_tests.py", "--at-most", MOST_SECONDS, "--beside-cuda", *BESIDE),
        is_queue=True,
    ),
    Pass(
        "demo",
        _program("demo.py", "--iters", "20", folder="simulated_demo"),
        summary=re.compile(r"^All numbers: .*"),
    ),
)


def command_of(one: Pass, build_dir: Path) -> list[str]:
    """Returns the command of a pass."""
    launcher = [sys.executable, str(ROOT / "tools" / "simulated_cuda.py")]
    return [*launcher, "--build-dir", str(build_dir), *one.options, "--", *one.command(build_dir)]


def run(one: Pass, build_dir: Path) -> tuple[bool, str]:
    """Runs a pass, and shows all that it printed if it fails.

    Returns:
        Whether it passed, and what the last line says that is its summary.
    """
    start = time.monotonic()
    log = build_dir / "simulated_logs" / f"{one.name.replace(' ', '_')}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        status = subprocess.run(
            command_of(one, build_dir), stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
        ).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = (line.strip() for line in reversed(text.splitlines()))
    found = next(filter(one.summary.match, lines), "ended without a summary").strip("= ")
    seconds = round(time.monotonic() - start)
    print(f"{text if status else ''}{one.name}: {found}; {seconds} s, {log}", flush=True)
    return status == 0, f"simulated, {one.name}: {found}"


def run_passes(passes: Sequence[Pass], build_dir: Path) -> int:
    """Runs them all, those that are single processes two at a time; returns how many failed."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        single = [pool.submit(run, one, build_dir) for one in passes if not one.is_queue]
        results = [one.result() for one in single]
    results += [run(one, build_dir) for one in passes if one.is_queue]
    print("\n".join(line for _, line in results))
    return sum(not passed for passed, _ in results)


def main() -> int:
    """Returns 0 if all passes passed.

    Raises:
        RuntimeError: The device is not built, or does not go with torch.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--only", default="", help="a part of the name of the passes to run")
    parser.add_argument("--skip", default="", help="a part of the name of those to leave out")
    options = parser.parse_args()
    build_dir = options.build_dir.resolve()
    if not is_built(build_dir):
        raise RuntimeError(f"{build_dir} has no simulated device: builds with CUDA on Linux have")
    check_torch(libraries(build_dir)[0])
    chosen = [one for one in PASSES if options.only in one.name]
    passes = [one for one in chosen if not options.skip or options.skip not in one.name]
    return int(run_passes(passes, build_dir) != 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"fastamp: {error}")
