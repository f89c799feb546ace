# SPDX-License-Identifier: Apache-2.0
"""What guards of compiled functions see of the recipes of a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastamp
from fastamp._dynamo import carried_state
from support.float8 import E4M3, float8_region, outcomes

BF16, FP16 = torch.bfloat16, torch.float16
OTHER = fastamp.float8.Recipe(grad_dtype=E4M3)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def test_the_recipe_is_guarded():
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    regions = [
        lambda: fastamp.autocast("cpu", dtype=BF16),
        float8_region,
        lambda: float8_region(float8=OTHER),
        lambda: float8_region(dtype=FP16),
    ]
    for count, region in enumerate(regions, start=1):
        with region():
            assert torch.equal(compiled(x), layer(x))
        assert counter.frame_count == count
    for region in [*regions[::-1], *regions]:
        for _ in range(2):
            with region():
                assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == len(regions)


def test_a_suspended_or_ended_recipe_is_guarded():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with float8_region():
            assert torch.equal(compiled(x), layer(x))
            for inside in (
                torch.autocast("cpu", enabled=False),
                torch.autocast("cpu", dtype=FP16),
                torch.autocast("cpu", dtype=BF16),
                fastamp.autocast("cpu", dtype=BF16),
                fastamp.autocast("cpu", float8=False),
                fastamp.autocast("cpu"),
            ):
                with inside:
                    assert torch.equal(compiled(x), layer(x))
        assert torch.equal(compiled(x), layer(x))


def test_a_recipe_is_told_inside_compiled_code():
    def forward(x: torch.Tensor) -> torch.Tensor:
        recipe = fastamp.float8.recipe("cpu")
        return x + 1 if recipe is None else x + 2

    compiled, x = torch.compile(forward, backend="eager"), torch.zeros(2)
    for _ in range(2):
        assert compiled(x)[0] == 1
        with float8_region():
            assert compiled(x)[0] == 2
            with torch.autocast("cpu", enabled=False):
                assert compiled(x)[0] == 1


def test_an_exception_leaves_no_recipe_in_guards():
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with fastamp.autocast("cpu", dtype=BF16):
        expected = compiled(x)
    with pytest.raises(ZeroDivisionError), float8_region():
        raise ZeroDivisionError
    region = float8_region()
    region.__enter__()
    with fastamp.autocast("cpu", dtype=FP16):
        region.__exit__(None, None, None)
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1


def test_a_generator_that_stops_in_a_region_leaves_eagers_state():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def produce() -> Iterator[torch.Tensor]:
        with float8_region():
            yield compiled(x)
            yield compiled(x)

    generator = produce()
    with fastamp.autocast("cpu", dtype=BF16):
        base_dtype = layer(x)
    first = next(generator)  # The region is open from here on, as in eager.
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(compiled(x), first)
    generator.close()
    assert torch.equal(compiled(x), layer(x))
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.equal(compiled(x), base_dtype)


def test_a_thread_that_dies_in_a_region_leaves_compiled_code_compiled():
    region = float8_region()
    thread = threading.Thread(target=region.__enter__)
    thread.start()
    thread.join()
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 2
    carried_state.let_go(policies=False)  # What the thread left open.


def test_other_threads_are_guarded_by_their_own_state():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def work() -> None:
        with fastamp.autocast("cpu", dtype=BF16):
            pairs.append((compiled(x), layer(x)))

    with float8_region():
        pairs.append((compiled(x), layer(x)))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(pairs) == 2
    assert not torch.equal(pairs[0][1], pairs[1][1])
    for found, expected in pairs:
        assert torch.equal(found, expected)


def test_without_guards_compiled_code_runs_eagerly(monkeypatch: pytest.MonkeyPatch):
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    monkeypatch.setattr(carried_state, "_are_recipes_guarded", False)
    with float8_region():
        assert torch.equal(compiled(x), layer(x))
        assert outcomes(lambda: compiled(x)) == ["float8"]
    assert counter.frame_count == 0
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_op_policies_still_run_compiled_code_eagerly_in_a_region():
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with float8_region():
        with fastamp.policies.override({"linear": "fp32"}):
            assert compiled(x).dtype == torch.float32
        assert counter.frame_count == 0
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1
