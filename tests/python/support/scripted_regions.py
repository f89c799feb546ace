# SPDX-License-Identifier: Apache-2.0
"""Functions whose regions TorchScript is to compile, and a program that compiles all of them.

The program prints as JSON, by function, the dtypes inside and outside its region, and the names of
the region classes in its graph. ``installed`` as its argument: while fastamp is installed.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch as plain_torch

import fastamp
import fastamp.amp
import fastamp.torch as torch


def by_fastamp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.mm(x, x)
    return inside, torch.mm(x, x)


def by_mirror(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.mm(x, x)
    return inside, torch.mm(x, x)


def by_amp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with fastamp.amp.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True):
        with torch.amp.autocast("cpu", enabled=False):
            outside = torch.mm(x, x)
        inside = torch.mm(x, x)
    return inside, outside


def by_cpu_amp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.cpu.amp.autocast():
        inside = torch.mm(x, x)
    return inside, torch.mm(x, x)


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with plain_torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.mm(x, x)
    return inside, torch.mm(x, x)


def by_torchs_cpu_amp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with plain_torch.cpu.amp.autocast():
        inside = torch.mm(x, x)
    return inside, torch.mm(x, x)


class Model(plain_torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = plain_torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.first(x)


FUNCTIONS = [by_fastamp, by_mirror, by_amp, by_torch]
if sys.version_info < (3, 14):  # There torch itself cannot compile classes that are deprecated.
    FUNCTIONS += [by_cpu_amp, by_torchs_cpu_amp]


def seen(function: Any) -> list[list[str]]:
    scripted: Any = plain_torch.jit.script(function)
    for _ in range(3):  # the profiling executor optimises after the first calls
        dtypes = [str(out.dtype) for out in scripted(plain_torch.ones(2, 2))]
    nodes = scripted.graph.findAllNodes("prim::CreateObject", True)
    return [dtypes, sorted({str(node.output().type()) for node in nodes})]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["installed"]:
        fastamp.install()
    print(json.dumps({function.__name__: seen(function) for function in FUNCTIONS}))
