# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

import fastamp

ROOT = Path(__file__).resolve().parent.parent


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()


def git_revision() -> str:
    """Returns the short revision, with ``-dirty`` if tracked files differ from it."""
    revision = _output("git", "rev-parse", "--short=10", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{revision or 'unknown'}{'-dirty' if changed else ''}"


def load() -> str:
    """Returns the load averages of 1, 5 and 15 minutes."""
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


def _memory(cuda: bool) -> str:
    if cuda:
        return f"{torch.cuda.get_device_properties().total_memory / 2**30:.0f} GiB"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def describe() -> dict[str, str]:
    """Returns the header of a result: all that may explain a number."""
    cuda = torch.cuda.is_available()
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "revision": git_revision(),
        "cpu": _cpu_model(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "memory": _memory(cuda=False),
        "load_at_start": load(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "gpu_memory": _memory(cuda=True) if cuda else "none",
        "driver": driver if cuda else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda or "none",
        "fastamp": fastamp.__version__,
        "compiler": fastamp.build_info()["compiler"],
        "build_type": fastamp.build_info()["build_type"],
    }
