# SPDX-License-Identifier: Apache-2.0
"""Runs `make gpu` on the simulated CUDA device, from its first stage to its report.

So nothing of it runs for the first time on a GPU. Its programs are the real ones, but for
compute-sanitizer: what would run under it runs with a guard page behind each tensor. Rows run
twice, with small tensors and models under the names of the large ones; tests are some of those that
need a GPU, since `make simcuda` runs them all. Everything is written below build/simulated_gpu, and
nothing of it is a result.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gpu_stage
import gpu_stages
from simulated_rows import make_rows_small
from tracked_files import ROOT

FOLDER = ROOT / "build" / "simulated_gpu"
PATIENCE = 10  # times the minutes of a GPU
A_FILE = "tests/python/ops/test_devices_and_streams.py"
SOME_TESTS = ("tests/python/graphed", A_FILE)
SANITIZER_OPTIONS = 2 * len(("--tool", "--error-exitcode", "--print-limit"))


def as_python(words: Sequence[str]) -> None:
    """Stands in for the interpreter of stages."""
    if words[:1] == ["-m"] and words[1].startswith("benchmarks"):
        sys.path.insert(0, str(ROOT))  # as -m does
        make_rows_small(FOLDER / "tree")
        sys.argv = list(words[1:])
        module = "benchmarks.__main__" if words[1] == "benchmarks" else words[1]
        runpy.run_module(module, None, "__main__")
        return
    if words and words[0].endswith("cmake_build.py"):
        # Programs under AddressSanitizer do not start beside a preloaded library: CMake, which
        # looks whether they do, would leave these tests out of the build folder of make.
        os.environ.pop("LD_PRELOAD", None)
    some = () if any(word.startswith("tests/") for word in words) else SOME_TESTS
    paths = some if words[:2] == ["-m", "pytest"] else ()
    os.execv(sys.executable, [sys.executable, *words, *paths])


def as_sanitizer(words: Sequence[str]) -> None:
    """Stands in for compute-sanitizer."""
    command = list(words[SANITIZER_OPTIONS:])
    if "memcheck" in words[:SANITIZER_OPTIONS]:
        os.environ["SIMULATED_CUDA_GUARDS"] = "1"
    elif (folder := A_FILE.rpartition("/")[0]) in command:
        # The same tests without guards: a file of them shows that the command is right.
        command = [A_FILE if word == folder else word for word in command]
    else:
        # Catch2 lists them, which shows the same. Version 2 ends with their number as its status.
        listing = [*command, "--list-tests"]
        told = subprocess.run(listing, stdout=subprocess.PIPE, text=True, check=False).stdout
        print(told, flush=True)
        raise SystemExit(not re.search(r"^[1-9]\d* matching test case", told, re.MULTILINE))
    os.execv(command[0], command)


def _stand_in(name: str) -> Path:
    """Makes a program that calls this one under a name."""
    program = FOLDER / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    call = shlex.join([sys.executable, str(Path(__file__).resolve()), f"--as-{name}"])
    program.write_text(f'#!/bin/sh\nexec {call} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def main(arguments: Sequence[str]) -> int:
    """Returns what `make gpu` does, or that of the program that this one stands in for."""
    stand_ins: dict[str, Callable[[Sequence[str]], None]] = {
        "--as-python": as_python,
        "--as-compute-sanitizer": as_sanitizer,
    }
    if arguments and arguments[0] in stand_ins:
        stand_ins[arguments[0]](list(arguments[1:]))
        return 0
    _stand_in("compute-sanitizer")
    sys.executable = str(_stand_in("python"))
    os.environ["PATH"] = f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}"
    gpu_stages.FOLDER = FOLDER / "gpu"
    stages = [replace(stage, minutes=PATIENCE * stage.minutes) for stage in gpu_stages.STAGES]
    gpu_stages.STAGES[:] = stages
    return gpu_stage.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
