# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/float8.md are taken out of it, and run as a reader would run them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fastamp
from packaging_tools import find_tool
from support.children import check_program

ROOT = Path(__file__).resolve().parents[2]


def block(document: str, language: str) -> str:
    """The one fenced block of a language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(found)


def check_trace(text: str) -> None:
    outcomes = [line.split("  ") for line in text.splitlines() if re.match(r"linear|addmm", line)]
    assert len(outcomes) == 2
    for wanted in ("yes", "no: excluded"):
        assert sum(wanted in [cell.strip() for cell in cells] for cells in outcomes) == 1, text


def test_the_python_program_runs_one_layer_in_fp8(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text(block("docs/float8.md", "python"), encoding="utf-8")
    check_trace(check_program(str(program)))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)  # <torch/torch.h> takes long to compile on a busy machine
def test_the_cpp_program_runs_one_layer_in_fp8(tmp_path: Path):
    (tmp_path / "main.cpp").write_text(block("docs/float8.md", "cpp"), encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(block("README.md", "cmake"), encoding="utf-8")
    prefixes = f"{torch.utils.cmake_prefix_path};{fastamp.cpp.cmake_prefix_path}"
    options = ["-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_PREFIX_PATH={prefixes}"]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    build = str(tmp_path / "build")
    cmake = find_tool("cmake")
    for step in (
        [cmake, "-S", str(tmp_path), "-B", build, *options],
        [cmake, "--build", build],
        [f"{build}/train"],
    ):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    check_trace(done.stdout)
