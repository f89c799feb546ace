# SPDX-License-Identifier: Apache-2.0
"""torch.export keeps our regions in the exported program, as it keeps torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_state

BF16, FP16 = torch.bfloat16, torch.float16


class Model(torch.nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.region = region

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain = self.linear(x)
        with self.region("cpu", dtype=BF16):
            lower = self.linear(x)
            with self.region("cpu", enabled=False):
                off = self.linear(x)
        with self.region("cpu", dtype=FP16):
            return plain, lower, off, self.linear(lower)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS = {
    "plain": nullcontext,
    "default device": default_device,
    "device context": lambda: torch.device("cpu"),
    "in a region": lambda: fastamp.autocast("cpu", dtype=BF16),
}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_computes_as_the_one_of_torchs_region(strict: bool, around: str):
    x = torch.ones(4, 8)
    before = torch_state()
    results, calls = [], []
    for region in (torch.autocast, fastamp.autocast):
        with SURROUNDINGS[around]():
            program = torch.export.export(Model(region), (x,), strict=strict)
        targets = [str(n.target) for m in program.graph_module.modules() for n in graph_nodes(m)]
        calls.append(sorted(t for t in targets if "aten" in t or "autocast" in t))
        results.append(program.module()(x))
    assert torch_state() == before
    assert calls[0] == calls[1]
    assert [t.dtype for t in results[1]] == [t.dtype for t in results[0]]
    if around != "in a region":
        assert [t.dtype for t in results[1]] == [torch.float32, BF16, torch.float32, FP16]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def graph_nodes(module: torch.nn.Module) -> list[torch.fx.Node]:
    return list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else []


def test_a_region_under_a_default_device_still_casts():
    with default_device(), fastamp.autocast("cpu", dtype=FP16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP16


def test_an_exception_during_export_restores_the_state():
    class Broken(torch.nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            with fastamp.autocast("cpu"):
                raise ZeroDivisionError

    before = torch_state()
    with pytest.raises(ZeroDivisionError):
        torch.export.export(Broken(), (torch.ones(2),), strict=False)
    assert torch_state() == before
