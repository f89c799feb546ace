# SPDX-License-Identifier: Apache-2.0
"""Machine code of the CUDA kernels, read without a GPU: registers, spills, width of accesses."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fastamp

REGISTERS = 65536  # of a processor; a thread gets a multiple of 8
SMALLER_PARTS = ("sm_86", "sm_87", "sm_89", "sm_12")  # 1536 threads at most
NEXT_ARCH = "sm_100"

pytestmark = pytest.mark.skipif(
    not fastamp.build_info()["cuda_version"], reason="fastamp was built without CUDA"
)


@dataclass(frozen=True)
class Kernel:
    """What a kernel's machine code must be like."""

    name: str  # in all mangled names of it, and in no others
    homes: int  # functions per architecture: one for each home of the table
    threads: int  # per processor, that the registers suffice for
    loads: int  # of 128 bits, at least
    stores: int
    scratch: bool = False  # sums of runs, which may be read by generic accesses of 64 bits


KERNELS = (
    Kernel("UnscaleOp", 3, 2048, 2, 2),
    Kernel("SquaresOpILb0", 3, 1280, 2, 0, scratch=True),
    Kernel("SquaresOpILb1", 3, 1024, 2, 2, scratch=True),
    # By StepKind: plain; remainders, which are moved 64 bits at a time as 16-bit gradients are;
    # noisy, whose moments have 16 bits; codes, whose moments have 8; turned, as noisy.
    Kernel("SgdOpILNS0_8StepKindE0", 3, 1024, 3, 2),
    Kernel("SgdOpILNS0_8StepKindE1", 3, 1024, 1, 1),
    Kernel("SgdOpILNS0_8StepKindE2", 3, 1024, 2, 1),
    Kernel("SgdOpILNS0_8StepKindE4", 3, 768, 2, 1),
    Kernel("AdamOpILNS0_8StepKindE0", 3, 768, 4, 3),
    Kernel("AdamOpILNS0_8StepKindE1", 3, 768, 2, 2),
    Kernel("AdamOpILNS0_8StepKindE2", 3, 512, 2, 1),
    Kernel("AdamOpILNS0_8StepKindE3", 3, 640, 2, 1),
    Kernel("AdamOpILNS0_8StepKindE4", 3, 512, 2, 1),
    Kernel("MuonMomentumOpILNS0_8StepKindE0", 3, 1024, 2, 2),
    Kernel("MuonMomentumOpILNS0_8StepKindE2", 3, 1024, 1, 1),
    Kernel("MuonMomentumOpILNS0_8StepKindE4", 3, 1024, 1, 1),
    Kernel("MuonApplyOpILNS0_8StepKindE0", 3, 1024, 2, 1),
    Kernel("MuonApplyOpILNS0_8StepKindE1", 3, 1024, 1, 1),
    Kernel("CastOp", 3, 1536, 2, 1),
    Kernel("Float8RangeOp", 3, 2048, 2, 0),
    Kernel("Float8TileOp", 3, 768, 4, 4),
    Kernel("Float8RefreshOp", 3, 768, 4, 4),
    Kernel("add_float8_sums_kernel", 1, 2048, 0, 0),
    Kernel("ExponentOp", 3, 1536, 0, 0, scratch=True),  # counts of runs, added by atomics
    Kernel("upload_kernel", 2, 1024, 0, 0),
    Kernel("update_scale_kernel", 1, 32, 0, 0),
)
BY_NAME = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def find_tool(name: str) -> str:
    """A tool: of the toolkit, or the copy in triton, which every CUDA torch for Linux brings."""
    places = [shutil.which(name)]
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        places.append(root and str(Path(root) / "bin" / name))
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends/nvidia/bin" / name))
    for place in places:
        if place and Path(place).is_file():
            return place
    pytest.fail(f"{name} is neither on the PATH nor in the toolkit nor in triton")


def library() -> str:
    (found,) = (Path(fastamp._C.__file__).parent / "lib").glob("libfastamp_cuda.so.*")
    return str(found)


@functools.cache
def functions(option: str) -> list[tuple[str, str, str]]:
    """(architecture, mangled name, text) of each function that cuobjdump shows."""
    command = [find_tool("cuobjdump"), option, library()]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = []
    for binary in re.split(r"^Fatbin elf code:$", text, flags=re.MULTILINE)[1:]:
        arch = re.search(r"^arch = (sm_\d+)", binary, flags=re.MULTILINE)
        assert arch is not None
        for part in re.split(r"^\s*Function\s*:?\s*", binary, flags=re.MULTILINE)[1:]:
            name = re.match(r"[^\s:]+", part)
            assert name is not None
            found.append((arch.group(1), name.group(), part))
    return found


def functions_of(kernel: Kernel, option: str) -> Iterator[tuple[str, str, str]]:
    found = [entry for entry in functions(option) if kernel.name in entry[1]]
    archs = {arch for arch, _, _ in found}
    assert archs, f"no code of {kernel.name} in the library"
    assert len(found) == kernel.homes * len(archs)
    yield from found


def most_registers(kernel: Kernel, arch: str) -> int:
    most = 1536 if arch.startswith(SMALLER_PARTS) else 2048
    return min(255, REGISTERS // min(kernel.threads, most) // 8 * 8)


def test_every_kernel_is_listed_here():
    for _, name, _ in functions("-res-usage"):
        assert sum(kernel.name in name for kernel in KERNELS) == 1, name


@BY_NAME
def test_registers_suffice_and_nothing_spills(kernel):
    for arch, name, text in functions_of(kernel, "-res-usage"):
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        assert (int(usage["STACK"]), int(usage["LOCAL"])) == (0, 0), (arch, name)
        assert int(usage["REG"]) <= most_registers(kernel, arch), (arch, name)


@BY_NAME
def test_arrays_are_moved_128_bits_at_a_time(kernel):
    for arch, name, code in functions_of(kernel, "-sass"):
        assert len(re.findall(r"\bLDG\.E\.128\b", code)) >= kernel.loads, (arch, name)
        assert len(re.findall(r"\bSTG\.E\.128\b", code)) >= kernel.stores, (arch, name)
        # A kernel that only reads gradients must not write them.
        assert kernel.stores > 0 or not re.search(r"\bSTG\.E\.128\b", code), (arch, name)
        # No local memory, and no generic accesses to arrays.
        assert not re.search(r"\b(LDL|STL)\b", code), (arch, name)
        generic = r"\b(LD|ST)\.E\.128\b" if kernel.scratch else r"\b(LD|ST)\.E\.(64|128)\b"
        assert not re.search(generic, code), (arch, name)


@pytest.fixture(scope="module")
def next_report(tmp_path_factory) -> dict[str, str]:
    """What ptxas says of each function for an architecture that only gets the library's PTX."""
    folder = tmp_path_factory.mktemp("ptx")
    subprocess.run(
        [find_tool("cuobjdump"), "-xptx", "all", library()],
        check=True,
        cwd=folder,
        capture_output=True,
    )
    modules = sorted(folder.glob("*.ptx"))
    if not modules:
        pytest.skip("the library was built without PTX")
    report = {}
    for module in modules:
        command = [find_tool("ptxas"), f"-arch={NEXT_ARCH}", "-v", "-o", "/dev/null", str(module)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        for part in re.split(r"Compiling entry function '", result.stderr)[1:]:
            report[part[: part.index("'")]] = part
    return report


@BY_NAME
def test_what_later_parts_compile_of_the_ptx_is_alike(kernel, next_report):
    found = [(name, text) for name, text in next_report.items() if kernel.name in name]
    assert len(found) == kernel.homes
    for name, text in found:
        spilled = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
        )
        registers = re.search(r"Used (\d+) registers", text)
        assert spilled is not None, text
        assert registers is not None, text
        assert spilled.groups() == ("0", "0", "0"), name
        assert int(registers.group(1)) <= most_registers(kernel, NEXT_ARCH), name
