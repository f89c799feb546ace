# SPDX-License-Identifier: Apache-2.0
"""examples/c/digits.c, compiled by a C compiler: it trains to the bits of a C++ program."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastamp
from packaging_tools import LIBRARY, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # <torch/torch.h> takes long to compile

INCLUDE = Path(fastamp.cpp.include_path)
TORCH = Path(torch.__file__).parent


def build(compiler: str, source: Path, program: Path, *options: str) -> Path:
    folders = [str(INCLUDE.parent / "lib"), str(TORCH / "lib")]
    links = [word for folder in folders for word in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    libraries = [f"-l:{LIBRARY}", "-ltorch", "-ltorch_cpu", "-lc10"]
    # CUDA's libraries, which torch finds by itself, are no part of the link.
    links += ["-Wl,--no-as-needed", *libraries, "-Wl,--allow-shlib-undefined"]
    command = [compiler, *options, f"-I{INCLUDE}", str(source), "-o", str(program), *links]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(program), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("c")
    strict = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
    return build(compiler, ROOT / "examples" / "c" / "digits.c", folder / "digits", *strict)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    pytest.importorskip("sklearn")
    path = tmp_path_factory.mktemp("data") / "digits.bin"
    subprocess.run([sys.executable, ROOT / "examples" / "data" / "digits.py", path], check=True)
    return path


def test_it_trains_to_the_bits_of_cpp(program, data, tmp_path):
    done = run(program, data)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^(\w+): loss \S+ -> (\S+),", done.stdout, re.MULTILINE))
    assert list(found) == ["float32", "bfloat16", "float16"]
    assert all(float.fromhex(loss) < 1.0 for loss in found.values()), done.stdout
    compiler = shutil.which("c++") or "g++"
    torchs = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    standard = "-std=c++20" if tuple(map(int, torch.__version__.split(".")[:2])) > (2, 12) else ""
    options = [*torchs, standard or "-std=c++17"]
    twin = build(compiler, ROOT / "tests/consumer/c_twin.cpp", tmp_path / "twin", *options)
    assert run(twin, data).stdout == done.stdout


def test_without_data_it_says_what_it_wants(program, tmp_path):
    assert "usage: digits DATA" in run(program).stderr
    assert "cannot open the data" in run(program, tmp_path / "nowhere").stderr
    (tmp_path / "short").write_bytes(b"1")
    assert "cannot read the data" in run(program, tmp_path / "short").stderr
