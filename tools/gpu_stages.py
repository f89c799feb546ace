# SPDX-License-Identifier: Apache-2.0
"""The stages of `make gpu`: what each runs, and how long it may take."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cmake_build import tests_left_out
from run_tests import ctest_command

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu"

Command = list[str]


@dataclass(frozen=True)
class Plan:
    """Commands that a stage runs on this machine.

    Attributes:
        commands: One after the other; without any, the stage is skipped.
        left_out: What cannot run, and why.
    """

    commands: list[Command] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: What ``--stage`` takes.
        text: What it is for.
        minutes: It is ended after that; what it wrote until then stays.
        plan: Returns what it runs, given the build folder; called when its turn comes.
        environment: Variables that are set for it.
        builds: Stages that build what it runs, again and quickly if it is built already. If the
            first fails, this one is skipped.
        reads: Stages whose results it reads: it runs again after them.
    """

    name: str
    text: str
    minutes: float
    plan: Callable[[Path], Plan]
    environment: tuple[tuple[str, str], ...] = ()
    builds: tuple[str, ...] = ("build",)
    reads: tuple[str, ...] = ()


def _build(*options: str) -> Callable[[Path], Plan]:
    def plan(build_dir: Path) -> Plan:
        # Where Catch2 is missing all but the C++ tests can still be built; `make test` fails there.
        tool = [sys.executable, str(ROOT / "tools" / "cmake_build.py"), "--tests", "AUTO"]
        jobs = ["--jobs", str(os.cpu_count() or 1)]
        return Plan([[*tool, "--build-dir", str(build_dir), *options, *jobs]])

    return plan


def _ctest(build_dir: Path) -> Plan:
    if reason := tests_left_out(build_dir):
        return Plan(left_out=[f"C++ tests: {reason}"])
    try:
        return Plan([ctest_command(build_dir, "cuda")])
    except SystemExit as error:
        return Plan(left_out=[f"C++ tests: {error}"])


def _pytest(*arguments: str, marks: str = "cuda") -> Command:
    # A package that is missing there ends the file that imports it, and no other.
    options = ["-q", "--continue-on-collection-errors", "-m", marks]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def _workers() -> list[str]:
    """Options for several processes: on an H200, 12 ran 600 tests in a minute."""
    parallel = importlib.util.find_spec("xdist") is not None
    return ["-n", str(min(os.cpu_count() or 1, 12))] if parallel else []


def find_sanitizer() -> str | None:
    """Returns compute-sanitizer: from PATH, from CUDA_HOME's toolkit, or from the usual place."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def cuda_tests(build_dir: Path) -> list[Command]:
    """Returns the commands of the C++ tests that need a GPU, as ctest knows them.

    Raises:
        subprocess.CalledProcessError: There is no build in the folder.
    """
    command = [ctest_command(build_dir, "cuda")[0], "--test-dir", str(build_dir)]
    listed = subprocess.run(
        [*command, "-L", "cuda", "--show-only=json-v1"], capture_output=True, text=True, check=True
    )
    tests = json.loads(listed.stdout)["tests"]
    return [list(test["command"]) for test in tests if test.get("command")]


def _programs(build_dir: Path) -> Plan:
    """Returns the C++ tests that need a GPU as commands, or why there are none."""
    reason = tests_left_out(build_dir)
    try:
        programs = [] if reason else cuda_tests(build_dir)
    except (OSError, SystemExit, subprocess.CalledProcessError) as error:
        programs, reason = [], f"{build_dir} holds no build with tests: {error}"
    if programs:
        return Plan(programs)
    return Plan(left_out=[f"C++ tests: {reason or 'none of this build needs a GPU'}"])


def _sanitized(tool: str, *, graphs: bool = False) -> Callable[[Path], Plan]:
    """Plans the tests that capture CUDA graphs, or all others, under a tool of the sanitizer."""

    def plan(build_dir: Path) -> Plan:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            missing = "compute-sanitizer is not installed: it comes with the CUDA toolkit"
            return Plan(left_out=[missing])
        prefix = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        tags = "[graph]" if graphs else "~[graph]"
        # One of hypothesis's tests takes minutes there: it allocates for each example.
        marks = "cuda and graph" if graphs else "cuda and not graph and not hypothesis"
        kernels = _pytest("tests/python/ops", marks=marks)
        native = _programs(build_dir)
        commands = [[*prefix, *program, tags] for program in native.commands]
        return Plan([*commands, [*prefix, *kernels]], native.left_out)

    return plan


def rows_file(name: str) -> Path:
    """Returns where a stage of benchmarks writes its rows."""
    return FOLDER / f"{name}-rows.json"


def _bench(name: str, pattern: str, minutes: float) -> Callable[[Path], Plan]:
    def plan(_: Path) -> Plan:
        words = ["--device", "cuda", "--filter", pattern, "--minutes", f"{minutes:g}"]
        out = ["--resume", "--out", str(rows_file(name))]
        return Plan([[sys.executable, "-m", "benchmarks", *words, *out]])

    return plan


def _report(_: Path) -> Plan:
    if not any(rows_file(name).is_file() for name in BENCHES):
        return Plan(left_out=["no rows were measured"])
    parts = [str(rows_file(name)) for name in BENCHES]
    return Plan(
        [
            [sys.executable, "-m", "benchmarks", "merge", *parts],
            [sys.executable, "-m", "benchmarks.report"],
        ]
    )


# By stage: the rows, and the minutes that they are given; the stage may take a third longer.
BENCHES: dict[str, tuple[str, float]] = {
    "bench-micro": (
        "^cuda: (?!claim)(kernel|mm|x @|linear|layer_norm|cat|relu|scale|unscale_|first ten|norm"
        "|clip_grad|unify|rotary|sparse|forward pass of)",
        1.3,
    ),
    "bench-steps": (
        r"^cuda: ((clip [a-z ]*\+ )?step \+ update|clip \+ step, guarded|two passes)",
        1.3,
    ),
    "bench-float8": ("^cuda: fp8", 1.3),
    "bench-training": (
        "^cuda: (digits|ResNet|ViT|BERT|GPT|12 blocks|weight copies|inference|16-bit weights|"
        "a step of four)",
        2.3,
    ),
    "bench-claims": ("^cuda: claim", 1.0),
}
# Here a build without the CUDA part would be none: it fails and says what is missing.
WITH_CUDA = (("FASTAMP_CUDA", os.environ.get("FASTAMP_CUDA") or "ON"),)
CPP = ("build", "build-rest")
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


# What a first run has to show comes first: does it build, is it right, is it fast.
STAGES = [
    Stage("build", "package, for this machine's GPUs", 3.5, _build("--package"), WITH_CUDA, ()),
    Stage("build-rest", "C++ tests that need a GPU", 1.5, _build("--gpu-tests"), WITH_CUDA),
    Stage("ctest", "C++ tests that need a GPU", 1, _ctest, builds=CPP),
    Stage("pytest", "Python tests that need a GPU", 4, lambda _: Plan([_pytest(*_workers())])),
    *_bench_stages("bench-micro", "bench-steps"),
    Stage("memcheck", "kernels under memcheck", 1.8, _sanitized("memcheck"), UNCACHED, CPP),
    Stage("racecheck", "kernels under racecheck", 1.8, _sanitized("racecheck"), UNCACHED, CPP),
    Stage("graphs", "captures under memcheck", 1, _sanitized("memcheck", graphs=True), builds=CPP),
    *_bench_stages("bench-float8", "bench-training", "bench-claims"),
    Stage("report", "one result of all rows, and its pages", 0.5, _report, reads=(*BENCHES,)),
]
