# SPDX-License-Identifier: Apache-2.0
"""The code for CUDA is a library of its own, opened when CUDA is asked for and torch has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastamp
from packaging_tools import ABI, LIBRARY
from support.children import check_python, child_environment

LIB = Path(fastamp._C.__file__).parent / "lib"
CUDA_LIBRARY = f"libfastamp_cuda.so.{ABI}"
OF_CUDA = r"cuda|cudart|cublas|nv"

needs_cuda_part = pytest.mark.skipif(
    not fastamp.build_info()["cuda_version"], reason="fastamp was built without CUDA"
)


def needed(library: Path) -> list[str]:
    text = subprocess.check_output(["readelf", "-d", library], text=True)
    return re.findall(r"NEEDED.*\[(.*)\]", text)


def test_neither_the_library_nor_the_module_needs_anything_of_cuda():
    for library in (LIB / LIBRARY, Path(fastamp._C.__file__)):
        assert [name for name in needed(library) if re.search(OF_CUDA, name)] == []


@needs_cuda_part
def test_the_library_for_cuda_needs_torchs_cuda_and_nothing_of_fastamp():
    names = needed(LIB / CUDA_LIBRARY)
    assert {"libtorch_cuda.so", "libc10_cuda.so"} <= set(names)
    assert any(name.startswith("libcudart") for name in names)
    assert [name for name in names if "fastamp" in name or "python" in name] == []


@needs_cuda_part
def test_the_library_for_cuda_exports_one_function():
    command = ["nm", "-D", "--defined-only", LIB / CUDA_LIBRARY]
    lines = subprocess.check_output(command, text=True).splitlines()
    assert [line.split()[2] for line in lines] == ["fastamp_cuda_part"]


@needs_cuda_part
def test_it_is_opened_when_cuda_is_asked_for_and_not_before():
    code = """
from pathlib import Path
import torch, fastamp
opened = lambda: "libfastamp_cuda" in Path("/proc/self/maps").read_text()
with fastamp.autocast("cpu", torch.bfloat16):
    torch.ones(4, 4) @ torch.ones(4, 4)
print(opened())
print(repr(fastamp._C.why_no_cuda_part()), opened())
"""
    reason = "''" if torch.version.cuda else "'torch has no CUDA'"
    said = check_python("-c", code).splitlines()
    assert said == ["False", f"{reason} {bool(torch.version.cuda)}"]


OTHER = """
struct Part { const char* build; } part{"fastamp 0.0.0, torch 1.0.0"};
extern "C" const Part* fastamp_cuda_part() { return &part; }
"""
BARE = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.why_no_cuda_part())
print(module.why_no_cuda_part())
"""


@pytest.mark.skipif(
    not (fastamp.build_info()["cuda_version"] and torch.version.cuda), reason="needs both"
)
def test_why_it_could_not_be_opened_is_kept_and_said(tmp_path: Path):
    """Copies of the native part: beside one is no library for CUDA, beside one that of another."""
    children = {}
    for name in ("none", "other"):
        (tmp_path / name / "lib").mkdir(parents=True)
        shutil.copy(LIB / LIBRARY, tmp_path / name / "lib")
        module = shutil.copy(fastamp._C.__file__, tmp_path / name)
        if name == "other":
            command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o"]
            other = tmp_path / name / "lib" / CUDA_LIBRARY
            subprocess.run([*command, other], input=OTHER, text=True, check=True)
        children[name] = subprocess.Popen(
            [sys.executable, "-c", BARE, module],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
    ended = {name: child.communicate() for name, child in children.items()}
    said = {name: out.splitlines() for name, (out, _) in ended.items()}
    assert [child.returncode for child in children.values()] == [0, 0]
    for name, (_, warned) in ended.items():  # once, though asked twice
        assert warned.count("fastamp's kernels for CUDA are not in use: ") == 1
        assert said[name][0] in warned
        assert "docs/install.md" in warned
    for first, second in said.values():
        assert first == second
    missing = f"its code for CUDA could not be opened: {tmp_path}/none/lib/{CUDA_LIBRARY}: "
    assert said["none"][0].startswith(missing)
    assert "No such file" in said["none"][0]
    assert said["other"][0] == (
        f"{tmp_path}/other/lib/{CUDA_LIBRARY} is of fastamp 0.0.0, torch 1.0.0, not of "
        f"fastamp {fastamp.__version__}, torch {fastamp.build_info()['torch_version']}"
    )
