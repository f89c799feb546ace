# SPDX-License-Identifier: Apache-2.0
"""Finds the oneDNN instruction set that this machine really runs.

Some virtual machines advertise instructions (AMX) that kill the process with SIGILL once oneDNN
uses them, in a bf16 matmul of 64x64 for instance. Only a trial in a child process shows. This file
imports neither fastamp nor torch, so that tools/with_cpu_isa.py can use it in 0.05 s.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"

# Best first; "" leaves oneDNN its own choice. AVX512_CORE_FP16 comes before AVX512_CORE_BF16, which
# makes fp16 a hundred times slower where both run.
LEVELS = ("", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")

_PROBE = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    a = torch.ones(64, 64, dtype=dtype)
    assert float((a @ a)[63, 63]) == 64.0
"""


def runs(level: str) -> bool:
    """Returns whether bf16 and fp16 matmuls survive in a child process at this level."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if level:
        environment[VARIABLE] = level
    child = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment, capture_output=True, check=False
    )
    if child.returncode > 0:  # an exception, not a signal: no level would mend it
        raise RuntimeError(f"probing torch on this CPU failed:\n{child.stderr.decode()}")
    return child.returncode == 0


def best_level(cache: Path | None = None) -> str:
    """Returns the best value for ONEDNN_MAX_CPU_ISA, "" where none is needed.

    Args:
        cache: File that keeps the answer for this CPU and torch; a first call without it takes
            some seconds.

    Returns:
        The level; that of the environment if the user has set one.

    Raises:
        RuntimeError: torch cannot multiply at any level.
    """
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    key = f"{_cpu_name()}; torch {version('torch')}"
    if cache is not None and cache.is_file():
        known: dict[str, str] = json.loads(cache.read_text(encoding="utf-8"))
        if key in known:
            return known[key]
    level = next((candidate for candidate in LEVELS if runs(candidate)), None)
    if level is None:
        raise RuntimeError(f"bf16 and fp16 matmuls crash on this CPU at every level of {LEVELS}")
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps({key: level}), encoding="utf-8")
    return level


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line.startswith(("model name", "stepping", "microcode"))]
    return " ".join(" ".join(line.split()) for line in wanted[:3])
