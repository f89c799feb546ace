# SPDX-License-Identifier: Apache-2.0
"""The stages of `make gpu`: what each runs, and how long it may take."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from run_tests import ctest_command

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu"

Command = list[str]


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: What ``--stage`` takes.
        text: What it is for.
        minutes: It is ended after that; what it wrote until then stays.
        commands: Returns what it runs, one after the other, or a sentence why it cannot.
        environment: Variables that are set for it.
    """

    name: str
    text: str
    minutes: float
    commands: Callable[[Path], list[Command] | str]
    environment: tuple[tuple[str, str], ...] = ()


def _build(build_dir: Path) -> list[Command]:
    tool = [sys.executable, str(ROOT / "tools" / "cmake_build.py")]
    jobs = ["--jobs", str(os.cpu_count() or 1)]
    return [[*tool, "--build-dir", str(build_dir), "--tests", *jobs]]


def _ctest(build_dir: Path) -> list[Command]:
    return [ctest_command(build_dir, cuda=True)]


def _pytest(*arguments: str, marks: str = "cuda") -> Command:
    # A package that is missing there ends the file that imports it, and no other.
    options = ["-q", "--continue-on-collection-errors", "-m", marks]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def find_sanitizer() -> str | None:
    """Returns compute-sanitizer: from PATH, from CUDA_HOME's toolkit, or from the usual place."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def cuda_tests(build_dir: Path) -> list[Command]:
    """Returns the commands of the C++ tests that need a GPU, as ctest knows them.

    Raises:
        subprocess.CalledProcessError: There is no build with tests in the folder.
    """
    command = [ctest_command(build_dir, cuda=True)[0], "--test-dir", str(build_dir)]
    listed = subprocess.run(
        [*command, "-L", "cuda", "--show-only=json-v1"], capture_output=True, text=True, check=True
    )
    tests = json.loads(listed.stdout)["tests"]
    return [list(test["command"]) for test in tests if test.get("command")]


def _sanitized(tool: str, *, graphs: bool = False) -> Callable[[Path], list[Command] | str]:
    """Plans the tests that capture CUDA graphs, or all others, under a tool of the sanitizer."""

    def commands(build_dir: Path) -> list[Command] | str:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            return "compute-sanitizer is not installed: it comes with the CUDA toolkit"
        try:
            programs = cuda_tests(build_dir)
        except (OSError, subprocess.CalledProcessError):
            return f"{build_dir} holds no build with tests: run stage build first"
        prefix = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        tags = "[graph]" if graphs else "~[graph]"
        marks = "cuda and graph" if graphs else "cuda and not graph"
        kernels = _pytest("--timeout=600", "tests/python/ops", marks=marks)
        native = [[*prefix, *program, tags] for program in programs]
        return [*native, [*prefix, *kernels]]

    return commands


def _bench(name: str, pattern: str, minutes: float) -> Callable[[Path], list[Command]]:
    def commands(_: Path) -> list[Command]:
        words = ["--device", "cuda", "--filter", pattern, "--minutes", f"{minutes:g}"]
        out = ["--out", str(FOLDER / f"{name}-rows.json")]
        return [[sys.executable, "-m", "benchmarks", *words, *out]]

    return commands


def _report(_: Path) -> list[Command]:
    parts = [str(FOLDER / f"{name}-rows.json") for name in BENCHES]
    return [
        [sys.executable, "-m", "benchmarks", "merge", *parts],
        [sys.executable, "-m", "benchmarks.report"],
    ]


# By stage: the rows, and the minutes that they are given; the stage may take half as long again.
BENCHES: dict[str, tuple[str, float]] = {
    "bench-micro": (
        "^cuda: (?!claim)(mm|x @|linear|layer_norm|cat|relu|scale|unscale_|norm|clip_grad)",
        1.3,
    ),
    "bench-steps": (r"^cuda: (clip [a-z ]*\+ )?step \+ update", 1.3),
    "bench-training": ("^cuda: (digits|ResNet|ViT|BERT|GPT|12 blocks|weight copies)", 2.6),
    "bench-claims": ("^cuda: claim", 1.8),
}
# The sanitizer must see each allocation as one; torch's cache would hide overruns within a block.
# Without the cache an allocation is a cudaMalloc, which a capture refuses.
UNCACHED = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)


def _bench_stages(*names: str) -> list[Stage]:
    return [
        Stage(
            name, f"rows {BENCHES[name][0]}", 1.35 * BENCHES[name][1], _bench(name, *BENCHES[name])
        )
        for name in names
    ]


# What a first run has to tell comes first: does it build, is it right, is it fast.
STAGES = [
    Stage("build", "everything, for the GPUs that are there", 5, _build),
    Stage("ctest", "C++ tests that need a GPU", 1, _ctest),
    Stage("pytest", "Python tests that need a GPU", 2, lambda _: [_pytest()]),
    *_bench_stages("bench-micro", "bench-steps"),
    Stage("memcheck", "the same kernels under memcheck", 3.5, _sanitized("memcheck"), UNCACHED),
    Stage("racecheck", "the same kernels under racecheck", 2.5, _sanitized("racecheck"), UNCACHED),
    Stage("graphs", "captures under memcheck", 1, _sanitized("memcheck", graphs=True)),
    *_bench_stages("bench-training", "bench-claims"),
    Stage("report", "one result of all rows, and the pages made of it", 0.5, _report),
]
