# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp info``: versions, the build, devices, and what is installed."""

from __future__ import annotations

import argparse
import os
import platform
import re
import warnings

import torch

import fastamp._C as _C
from fastamp._debug.report import json_of
from fastamp._install.installation import is_installed
from fastamp._policy.table import op_table
from fastamp._util import cpu_isa


def main(arguments: list[str]) -> None:
    """Prints what a bug report needs."""
    parser = argparse.ArgumentParser(prog="python -m fastamp info", description=__doc__)
    parser.add_argument(
        "--no-probe", action="store_true", help="do not try the CPU's instructions in a child"
    )
    parser.add_argument("--json", action="store_true", help="print it as data")
    options = parser.parse_args(arguments)
    found = facts(probe=not options.no_probe)
    if options.json:
        print(json_of("info", dict(found)))
        return
    for title, rows in found.items():
        print(f"{title}:")
        for name, value in rows.items():
            print(f"  {name + ':':22} {value}")


def facts(probe: bool) -> dict[str, dict[str, str]]:
    """Everything that a report of a bug needs, by title.

    Args:
        probe: Whether to try the CPU's instructions in a child.
    """
    return {
        "versions": _versions(),
        "build": _build(),
        "devices": _devices(),
        "cpu instructions": _instructions(probe),
        "in this process": _installed(),
    }


def _versions() -> dict[str, str]:
    return {
        "fastamp": _C.build_info()["version"],
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
    }


def _build() -> dict[str, str]:
    info = _C.build_info()
    return {
        "torch": info["torch_version"],
        "cuda": info["cuda_version"] or "none: a CPU-only build",
        "cuda architectures": info["cuda_archs"] or "none",
        "code for cuda": _C.why_no_cuda_part() or "in use",
        "compiler": info["compiler"],
        "type": info["build_type"],
    }


def _devices() -> dict[str, str]:
    cpu = re.sub(r"^model name : | stepping : .*", "", cpu_isa._cpu_name())
    devices = {"cpu": f"{cpu}, {torch.get_num_threads()} threads"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver: said below
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        devices[f"cuda:{index}"] = (
            f"{properties.name}, compute {properties.major}.{properties.minor}, {memory:.1f} GiB"
        )
    if count == 0:
        devices["cuda"] = "none"
    return devices


def _instructions(probe: bool) -> dict[str, str]:
    setting = os.environ.get(cpu_isa.VARIABLE)
    facts = {
        "torch finds": torch.backends.cpu.get_cpu_capability(),
        cpu_isa.VARIABLE: setting or "not set",
    }
    if probe and setting is None:
        best = cpu_isa.best_level()
        facts["oneDNN needs"] = (
            f"{cpu_isa.VARIABLE}={best}: bf16 or fp16 matmuls crash without it"
            if best
            else "no setting: bf16 and fp16 matmuls run"
        )
    return facts


def _installed() -> dict[str, str]:
    edited = [
        row.op for row in op_table() if (row.cpu, row.cuda) != (row.cpu_default, row.cuda_default)
    ]
    return {
        "autocast kernels": "fastamp's" if _C.kernels_registered() else "torch's",
        "torch.autocast is": "fastamp's" if is_installed() else "torch's (fastamp.install())",
        "edited op policies": ", ".join(edited) or "none",
        "FASTAMP_NO_REGISTER": os.environ.get("FASTAMP_NO_REGISTER", "not set"),
    }
