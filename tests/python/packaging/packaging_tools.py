# SPDX-License-Identifier: Apache-2.0
"""Configures, builds and runs tests/consumer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
TORCH_DIR = Path(torch.__file__).resolve().parent
TORCH_PREFIX = torch.utils.cmake_prefix_path


def find_tool(name):
    beside = Path(sys.executable).parent
    path = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    assert path is not None, f"{name} is needed to build the consumer programs"
    return path


def call(*command):
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    result = subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # CMake breaks its messages into lines of its own choice.
    return result.returncode, " ".join(result.stdout.split())


def configure(build_dir, prefixes, *options, python=False):
    """Configures; the folder is new each time, or it would remember the last options."""
    (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
    find_python = [] if python else ["-DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON"]
    if shutil.which("ccache"):
        find_python.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    return call(
        find_tool("cmake"),
        *("-S", ROOT / "tests" / "consumer", "-B", build_dir, "-GNinja"),
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        f"-DCMAKE_PREFIX_PATH={';'.join(str(prefix) for prefix in prefixes)}",
        "-DCMAKE_BUILD_TYPE=Release",
        *find_python,
        *options,
    )


def build_and_run(build_dir, program="consumer", *arguments):
    status, output = call(find_tool("cmake"), "--build", build_dir, "--target", program)
    assert status == 0, output
    return call(build_dir / program, *arguments)
