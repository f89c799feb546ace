# SPDX-License-Identifier: Apache-2.0
"""Configures, builds and runs tests/consumer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import fastamp

ROOT = Path(__file__).resolve().parents[3]
TORCH_DIR = Path(torch.__file__).resolve().parent
TORCH_PREFIX = torch.utils.cmake_prefix_path
# The minor version is that of the ABI.
ABI = ".".join(fastamp.__version__.split(".")[:2])
LIBRARY = f"libfastamp.so.{ABI}"


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


def build_example(folder: Path, name: str) -> Path:
    """Builds examples/cpp/NAME.cpp as a reader of the README would; returns the program."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (cmake,) = re.findall(r"^```cmake\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (folder / "CMakeLists.txt").write_text(cmake, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "cpp" / f"{name}.cpp", folder / "main.cpp")
    prefixes = f"{TORCH_PREFIX};{fastamp.cpp.cmake_prefix_path}"
    options = ["-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_PREFIX_PATH={prefixes}"]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    build, tool = folder / "build", find_tool("cmake")
    for step in (["-S", folder, "-B", build, *options], ["--build", build]):
        status, output = call(tool, *step)
        assert status == 0, output
    return build / "train"
