# SPDX-License-Identifier: Apache-2.0
"""Machine code of the CUDA kernels, read without a GPU: registers, spills, width of accesses."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fastamp

# Registers a thread may have for all threads of a processor to be resident (64 Ki registers).
RESIDENT_THREADS = {"sm_80": 2048, "sm_90": 2048, "sm_100": 2048}
SMALLER_PARTS = 1536  # 8.6, 8.7, 8.9, 12.x

pytestmark = pytest.mark.skipif(
    not fastamp.build_info()["cuda_version"], reason="fastamp was built without CUDA"
)


def cuobjdump() -> str:
    """The tool: of the toolkit, or the copy in triton, which every CUDA torch for Linux brings."""
    places = [shutil.which("cuobjdump")]
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        places.append(root and str(Path(root) / "bin" / "cuobjdump"))
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"))
    for place in places:
        if place and Path(place).is_file():
            return place
    pytest.fail("cuobjdump is neither on the PATH nor in the toolkit nor in triton")


@functools.cache
def dump(option: str) -> str:
    package = Path(fastamp._C.__file__).parent
    library = package / "lib" / "libfastamp.so"
    command = [cuobjdump(), option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sections(option: str, function: str) -> list[tuple[str, str, str]]:
    """(architecture, kernel, its text) of each kernel whose mangled name holds ``function``."""
    found = []
    for binary in re.split(r"^Fatbin elf code:$", dump(option), flags=re.MULTILINE)[1:]:
        arch = re.search(r"^arch = (sm_\d+)", binary, flags=re.MULTILINE)
        assert arch is not None
        for part in re.split(r"^\s*Function\s*:?\s*", binary, flags=re.MULTILINE)[1:]:
            name = re.match(r"[^\s:]+", part)
            assert name is not None
            if function in name.group():
                found.append((arch.group(1), name.group(), part))
    return found


def test_unscale_fits_the_registers_of_full_occupancy_and_spills_nothing():
    kernels = sections("-res-usage", "UnscaleOp")
    archs = {arch for arch, _, _ in kernels}
    assert archs, "no code of the unscale kernel in the library"
    assert len(kernels) == 3 * len(archs)  # two argument tables and the device table
    for arch, name, text in kernels:
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        assert (int(usage["STACK"]), int(usage["LOCAL"])) == (0, 0), name
        assert int(usage["REG"]) <= 65536 // RESIDENT_THREADS.get(arch, SMALLER_PARTS), name


def test_unscale_moves_128_bits_at_a_time():
    kernels = sections("-sass", "UnscaleOp")
    assert kernels
    for _, name, code in kernels:
        assert re.search(r"\bLDG\.E\.128\b", code), name
        assert re.search(r"\bSTG\.E\.128\b", code), name
        # No local memory, and no generic accesses to gradients.
        assert not re.search(r"\b(LDL|STL)\b", code), name
        assert not re.search(r"\b(LD|ST)\.E\.128\b", code), name


def test_norm_reads_128_bits_at_a_time_and_spills_nothing():
    kernels = sections("-res-usage", "SquaresOp")
    archs = {arch for arch, _, _ in kernels}
    assert archs, "no code of the norm kernels in the library"
    # Three homes of the table, for reading and for unscaling.
    assert len(kernels) == 6 * len(archs)
    for _, name, text in kernels:
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        assert (int(usage["STACK"]), int(usage["LOCAL"])) == (0, 0), name
        # 1536 threads per processor, 1024 if it unscales.
        assert int(usage["REG"]) <= (64 if "SquaresOpILb1" in name else 42), name
    for _, name, code in sections("-sass", "SquaresOp"):
        assert re.search(r"\bLDG\.E\.128\b", code), name
        assert ("SquaresOpILb1" in name) == bool(re.search(r"\bSTG\.E\.128\b", code)), name
        assert not re.search(r"\b(LDL|STL)\b", code), name
        assert not re.search(r"\b(LD|ST)\.E\.128\b", code), name


@pytest.mark.parametrize(("op", "arrays", "registers"), [("SgdOp", 3, 64), ("AdamOp", 4, 128)])
def test_fused_steps_move_128_bits_at_a_time_and_spill_nothing(op, arrays, registers):
    kernels = sections("-res-usage", op)
    archs = {arch for arch, _, _ in kernels}
    assert archs, f"no code of {op} in the library"
    assert len(kernels) == 3 * len(archs)
    for _, name, text in kernels:
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        assert (int(usage["STACK"]), int(usage["LOCAL"])) == (0, 0), name
        assert int(usage["REG"]) <= registers, name  # 1024 and 512 threads per processor
    for _, name, code in sections("-sass", op):
        # Gradient, weight and moments come in, and go out.
        assert len(re.findall(r"\bLDG\.E\.128\b", code)) >= arrays, name
        assert len(re.findall(r"\bSTG\.E\.128\b", code)) >= arrays, name
        assert not re.search(r"\b(LDL|STL)\b", code), name
        assert not re.search(r"\b(LD|ST)\.E\.(64|128)\b", code), name


def test_cast_moves_128_bits_at_a_time_and_spills_nothing():
    kernels = sections("-res-usage", "CastOp")
    archs = {arch for arch, _, _ in kernels}
    assert archs, "no code of the cast kernel in the library"
    assert len(kernels) == 3 * len(archs)
    for _, name, text in kernels:
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        assert (int(usage["STACK"]), int(usage["LOCAL"])) == (0, 0), name
        assert int(usage["REG"]) <= 42, name  # 1536 threads per processor
    for _, name, code in sections("-sass", "CastOp"):
        assert len(re.findall(r"\bLDG\.E\.128\b", code)) >= 2, name
        assert re.search(r"\bSTG\.E\.128\b", code), name
        assert not re.search(r"\b(LDL|STL)\b", code), name
        assert not re.search(r"\b(LD|ST)\.E\.128\b", code), name


def test_update_scale_keeps_everything_in_registers():
    kernels = sections("-res-usage", "update_scale_kernel")
    assert kernels
    for _, name, text in kernels:
        usage = dict(re.findall(r"(STACK|LOCAL):(\d+)", text))
        assert (int(usage["STACK"]), int(usage["LOCAL"])) == (0, 0), name
