# SPDX-License-Identifier: Apache-2.0
"""Modules under policies, compiled and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastamp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def no_graphs_are_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Inner(), nn.Linear(8, 8))


def in_region(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    def function(x: torch.Tensor) -> Any:
        with fastamp.autocast("cpu", dtype=BF16):
            out = model(x)
        return out  # noqa: RET504  (dynamo cannot trace a return out of a block)

    return function


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
VALUES: dict[str, Any] = {
    "fp32": "fp32",
    "pass": {"0": "fp32", "1": "pass"},
    "dtype": FP16,
    "ops": {"1": {"linear": "fp32"}},
}


def policies(name: str) -> Any:
    value = VALUES[name]
    return value if isinstance(value, dict) else {"1": value}


def gradients(model: nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", VALUES)
def test_compiled_results_are_the_eager_ones(name: str):
    model = make()
    plain = in_region(model)(X)
    fastamp.policies.for_modules(model, policies(name))
    expected = in_region(model)(X)
    assert not torch.equal(expected.float(), plain.float())
    compiled = torch.compile(in_region(model), backend="aot_eager", fullgraph=name != "ops")
    out = compiled(X)
    assert torch.equal(out, expected)
    for mine, other in zip(gradients(model, out), gradients(model, expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", VALUES)
def test_a_compiled_model_in_a_region_around_it(name: str):
    model = make()
    fastamp.policies.for_modules(model, policies(name))
    expected = in_region(model)(X)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(in_region(compiled)(X), expected)
    assert torch.equal(compiled(X), model(X))


def test_graphs_follow_the_beginning_and_the_end_of_policies():
    model = make()
    compiled = torch.compile(in_region(model), backend="aot_eager", fullgraph=True)
    before = compiled(X)
    released = fastamp.policies.for_modules(model, {"1": "fp32"})
    inside = compiled(X)
    assert torch.equal(inside, in_region(model)(X))
    assert not torch.equal(inside, before)
    released.release()
    assert torch.equal(compiled(X), before)


def test_op_policies_in_one_graph_are_refused():
    model = make()
    fastamp.policies.for_modules(model, {"1": {"linear": "fp32"}})
    compiled = torch.compile(in_region(model), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="op policies of its own runs eagerly"):
        compiled(X)
    assert not torch.is_autocast_enabled("cpu")


def test_an_exception_in_compiled_code_leaves_no_state():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ x.t()
            if y.sum() > -1e30:
                raise RuntimeError("as a test")
            return y

    model = nn.Sequential(nn.Linear(8, 8), Failing())
    for value in ("fp32", FP16, {"mm": "fp32"}):
        with fastamp.policies.for_modules(model, {"1": value}):
            compiled = torch.compile(model, backend="eager")
            with fastamp.autocast("cpu", dtype=BF16):
                with pytest.raises(RuntimeError, match="as a test"):
                    compiled(X)
                assert torch.get_autocast_dtype("cpu") == BF16
                assert torch.is_autocast_enabled("cpu")
                assert fastamp.policies.get("mm", "cpu") == "lower"


# Programs of strict export whose regions are nested do not run (torch 2.11), whoever nested them.
@pytest.mark.parametrize("value", ["fp32", FP16])
def test_exported_programs_keep_the_regions(value: Any):
    model = make()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=BF16):
                out: torch.Tensor = self.model(x)
            return out

    whole = Whole()
    plain = whole(X)
    fastamp.policies.for_modules(whole, {"model.1": value})
    expected = whole(X)
    program = torch.export.export(whole, (X,), strict=False)
    assert torch.equal(program.module()(X), expected)
    assert not torch.equal(expected, plain)


@fastamp.policies.fp32
def product(x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def test_the_decorator_compiles():
    square = torch.randn(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=BF16):
            low = x @ square
            out = product(low, y=square)
        return out  # noqa: RET504

    out = torch.compile(function, backend="aot_eager", fullgraph=True)(square)
    assert out.dtype == FP32
    assert torch.equal(out, function(square))
