# SPDX-License-Identifier: Apache-2.0
"""Programs that torch.export and make_fx record in fp8 regions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fastamp
from support.children import check_python
from support.float8 import float8_region

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


class WithRegion(nn.Module):
    def __init__(self, model: nn.Module, **region: Any) -> None:
        super().__init__()
        self.model, self.region = model, region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=BF16, **self.region):
            return self.model(x)


def products(graph: Any) -> int:
    return [str(node.target) for node in graph.nodes].count("aten._scaled_mm.default")


def in_fp8(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with float8_region(), torch.no_grad():
        found: torch.Tensor = model(x)
    return found


def in_base_dtype(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with fastamp.autocast("cpu", dtype=BF16), torch.no_grad():
        found: torch.Tensor = model(x)
    return found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_program_decomposed_in_a_region_computes_in_fp8(strict: bool, grad: bool):
    model, x = model_of(), torch.randn(5, 32)
    with float8_region(), torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,), strict=strict).run_decompositions({})
    assert products(program.graph) == 2
    assert torch.equal(program.module()(x), in_fp8(model, x))


def test_its_rows_may_be_dynamic():
    model = model_of()
    rows = torch.export.Dim("rows", min=2, max=4096)
    with float8_region():
        program = torch.export.export(
            model, (torch.randn(5, 32),), dynamic_shapes=({0: rows},)
        ).run_decompositions({})
    for count in (2, 16, 33, 4096):
        x = torch.randn(count, 32)
        assert torch.equal(program.module()(x), in_fp8(model, x))


def test_it_runs_in_a_process_without_fastamp(tmp_path: Path):
    model, x = model_of(), torch.randn(5, 32)
    with float8_region():
        program = torch.export.export(model, (x,)).run_decompositions({})
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((x, in_fp8(model, x)), tmp_path / "values.pt")
    check_python(
        "-c",
        "import sys, torch\n"
        f"program = torch.export.load({str(tmp_path / 'program.pt2')!r})\n"
        f"x, expected = torch.load({str(tmp_path / 'values.pt')!r})\n"
        "assert torch.equal(program.module()(x), expected)\n"
        "assert 'fastamp' not in sys.modules\n",
    )


def test_excluded_weights_are_followed():
    model, x = model_of(), torch.randn(5, 32)
    with fastamp.float8.exclude(model[2]), float8_region():
        program = torch.export.export(model, (x,)).run_decompositions({})
        expected = in_fp8(model, x)
    assert products(program.graph) == 1
    assert torch.equal(program.module()(x), expected)


def test_a_region_inside_the_model_is_recorded_without_its_recipe():
    model, x = model_of(), torch.randn(4, 32)
    inside = WithRegion(model, float8=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.export.export(inside, (x,), strict=True)
    program = torch.export.export(inside, (x,), strict=False)
    base_dtype = in_base_dtype(model, x)
    assert torch.equal(program.module()(x), base_dtype)
    assert torch.equal(program.run_decompositions({}).module()(x), base_dtype)
    with float8_region():
        decomposed = program.run_decompositions({})
    assert torch.equal(decomposed.module()(x), in_fp8(model, x))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_ops_of_torch_alone(mode: str):
    x = torch.randn(17, 32)
    weight = nn.Parameter(torch.randn(48, 32))

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ weight.t(), nn.functional.linear(x, weight)

    with float8_region():
        graph = make_fx(function, tracing_mode=mode)(x, weight)
        expected = function(x, weight)
    assert products(graph.graph) == 2
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert all(name.startswith(("aten.", "<built-in")) for name in calls)
    for found, wanted in zip(graph(x, weight), expected, strict=True):
        assert torch.equal(found, wanted)
