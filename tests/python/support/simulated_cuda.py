# SPDX-License-Identifier: Apache-2.0
"""What tests ask of the simulated CUDA device (tests/simulated_cuda) when it is there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patience import patience
from simulated_cuda import is_built, libraries
from support.children import child_environment
from tracked_files import ROOT

BUILD = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
_UNKNOWN = 2**64 - 1


def _runtime() -> ctypes.CDLL | None:
    process = ctypes.CDLL(None)
    return process if hasattr(process, "simulated_cuda_count") else None


def is_simulated() -> bool:
    """Whether this process has the simulated device: the launcher has preloaded it."""
    return _runtime() is not None


def need_real_gpu(reason: str) -> None:
    """Skips a test on the simulated device: the mark needs_real_gpu for some of its cases."""
    if is_simulated():
        pytest.skip(f"not simulated: {reason}")


def count(name: str) -> int:
    """How often so far: a function of the runtime, by its name, or one of Count (calls.h)."""
    runtime = _runtime()
    assert runtime is not None
    runtime.simulated_cuda_count.restype = ctypes.c_uint64
    found = int(runtime.simulated_cuda_count(name.encode()))
    assert found != _UNKNOWN, f"nothing is counted under the name {name}"
    return found


class Counted:
    """How often something was done in a block; read after it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._before = {name: count(name) for name in names}
        self._after: dict[str, int] = {}

    def stop(self) -> None:
        self._after = {name: count(name) for name in self._before}

    def __getitem__(self, name: str) -> int:
        return self._after[name] - self._before[name]


@contextmanager
def counted(*names: str) -> Iterator[Counted]:
    counts = Counted(names)
    yield counts
    counts.stop()


@contextmanager
def allocations_fail(first: int = 1, *, until_freed: bool = False) -> Iterator[None]:
    """From the first-th allocation of device memory on each fails, until memory is freed or not."""
    runtime = _runtime()
    assert runtime is not None
    fail = runtime.simulated_cuda_fail_allocations
    fail(ctypes.c_ulong(first), ctypes.c_bool(until_freed))
    try:
        yield
    finally:
        fail(ctypes.c_ulong(0), ctypes.c_bool(False))


@contextmanager
def late_work() -> Iterator[None]:
    """Kernels and copies run as late as the calls that wait allow."""
    runtime = _runtime()
    assert runtime is not None
    runtime.simulated_cuda_set_late.restype = ctypes.c_bool
    before = runtime.simulated_cuda_set_late(ctypes.c_bool(True))
    try:
        yield
    finally:
        runtime.simulated_cuda_set_late(ctypes.c_bool(before))


def why_not_built() -> str:
    """Why children cannot have the device; "" if they can."""
    if is_built(BUILD):
        return ""
    return f"{BUILD} has no simulated device: builds with CUDA on Linux have"


def run_simulated(
    *arguments: str, options: tuple[str, ...] = (), timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` with the device; does not check the exit code.

    Args:
        arguments: Of the interpreter.
        options: Of the launcher, tools/simulated_cuda.py.
        timeout: Seconds on two idle cores after which it counts as hanging.
    """
    launcher = [sys.executable, str(ROOT / "tools" / "simulated_cuda.py"), *options, "--"]
    environment = child_environment()
    own = {str(path) for path in libraries(BUILD)}  # a child has them once
    preloaded = environment.get("LD_PRELOAD", "").split()
    environment["LD_PRELOAD"] = " ".join(path for path in preloaded if path not in own)
    return subprocess.run(
        [*launcher, sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(timeout),
        check=False,
    )
