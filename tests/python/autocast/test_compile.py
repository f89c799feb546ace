# SPDX-License-Identifier: Apache-2.0
"""torch.compile traces our regions as it traces torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import fastamp
from support.autocast_state import torch_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = ["eager", "aot_eager"]
W = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_inside(region: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = torch.mm(x, W)
        with region("cpu", dtype=BF16):
            inside = torch.mm(x, W)
            with region("cpu", enabled=False):
                off = torch.mm(x, W)
            with region("cpu", dtype=FP16):
                other = torch.mm(x, W)
        return before, inside, off, other, torch.nn.functional.layer_norm(inside, (8,))

    return function


def make_ready(region: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    ready = region("cpu", dtype=FP16)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with ready:
            return (torch.mm(x, W),)

    return function


def make_decorated(region: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    @region("cpu", dtype=BF16)
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(torch.mm(x, W), x)

    return lambda x: (inner(x), torch.mm(x, W))


def make_keywords(region: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with region(device_type="cpu", dtype=FP16, enabled=True, cache_enabled=False):
            return (torch.mm(x, W),)

    return function


MAKERS = [
    make_inside,
    make_ready,
    make_decorated,
    make_keywords,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", MAKERS)
def test_region_inside_compiles_to_one_graph_with_torchs_results(make: Any, backend: str):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).expand(4, 8).clone()
    x = torch.cat([x, x])
    before = torch_state()
    expected = torch.compile(make(torch.autocast), backend=backend, fullgraph=True)(x)
    got = torch.compile(make(fastamp.autocast), backend=backend, fullgraph=True)(x)
    assert torch_state() == before
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    eager = make(fastamp.autocast)(x)
    assert [t.dtype for t in got] == [t.dtype for t in eager]


@pytest.mark.parametrize("backend", BACKENDS)
def test_region_around_a_compiled_module_trains_with_torchs_bits(backend: str):
    results = []
    for region in (torch.autocast, fastamp.autocast):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
        model = torch.nn.Sequential(*layers)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        x = torch.ones(4, 8)
        with region("cpu", dtype=BF16):
            out = compiled(x)
            loss = torch.nn.functional.mse_loss(out, x)
        loss.backward()
        assert out.dtype == BF16
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_steps_with_fresh_regions_do_not_recompile():
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=BF16):
            return torch.mm(x, W)

    shared = fastamp.autocast("cpu", dtype=BF16)
    x = torch.ones(8, 8)
    for _ in range(5):
        function(x)
    assert counter.frame_count == 1
    for _ in range(5):
        with fastamp.autocast("cpu", dtype=BF16):
            function(x)
        with shared:
            function(x)
    assert counter.frame_count == 2


def test_a_region_of_another_dtype_around_recompiles_and_gives_that_dtype():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, W)

    x = torch.ones(8, 8)
    dtypes = [function(x).dtype]
    for dtype in (BF16, FP16, BF16):
        with fastamp.autocast("cpu", dtype=dtype):
            dtypes.append(function(x).dtype)
    assert dtypes == [FP32, BF16, FP16, BF16]


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_break_inside_the_region_keeps_the_region(backend: str):
    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        with fastamp.autocast("cpu", dtype=FP16):
            first = torch.mm(x, W)
            torch._dynamo.graph_break()
            second = torch.mm(x, W)
        return [first, second, torch.mm(x, W)]

    before = torch_state()
    assert [t.dtype for t in function(torch.ones(8, 8))] == [FP16, FP16, FP32]
    assert torch_state() == before


def fail(_x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("backend", BACKENDS)
def test_exception_inside_the_region_restores_the_state(backend: str):
    disabled = torch._dynamo.disable(fail)

    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=FP16):
            x = torch.mm(x, W)
            return disabled(x)

    before = torch_state()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            function(torch.ones(8, 8))
        assert torch_state() == before


def test_compiled_function_called_in_a_region_under_no_grad_then_grad():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, W)

    x = torch.ones(8, 8)
    with fastamp.autocast("cpu"):
        with torch.no_grad():
            torch.mm(x, W)
            function(x)
        (grad,) = torch.autograd.grad(function(x).sum(), W)
    assert grad.abs().sum() > 0


def test_weight_cached_before_a_compiled_call_is_not_baked_into_the_graph():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w)

    w = torch.nn.Parameter(torch.ones(8, 8))
    x = torch.ones(8, 8)
    with fastamp.autocast("cpu"):
        torch.mm(x, w)
        function(x, w)
        with torch.no_grad():
            w.mul_(2)
        assert torch.equal(function(x, w), torch.full((8, 8), 16.0, dtype=BF16))
        assert torch.equal(torch.mm(x, w), torch.full((8, 8), 16.0, dtype=BF16))


@pytest.mark.slow
def test_inductor_gives_torchs_dtypes_and_values():
    x = torch.ones(8, 8)
    results = []
    for region in (torch.autocast, fastamp.autocast):
        torch._dynamo.reset()
        results.append(torch.compile(make_keywords(region), fullgraph=True)(x))
    for own, torchs in zip(results[1], results[0], strict=True):
        assert own.dtype == torchs.dtype
        assert torch.equal(own, torchs)


def test_a_subclass_of_the_region_that_torch_cannot_trace_still_works_compiled():
    class Mine(fastamp.autocast):
        pass

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        with Mine("cpu", dtype=FP16):
            return torch.mm(x, W)

    assert function(torch.ones(8, 8)).dtype == FP16


class RefusalError(Exception):
    """Of a custom op, at run time."""


@torch.library.custom_op("fastamp_test_compile::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] > 0:
        raise RefusalError
    return x.clone()


refuse.register_fake(torch.empty_like)


@pytest.mark.parametrize("installed", [False, True], ids=["", "installed"])
@pytest.mark.parametrize("region", [fastamp.autocast, torch.autocast])
@pytest.mark.parametrize("backend", [*BACKENDS, lambda gm, _inputs: lambda *args: gm(*args)])
def test_a_compiled_function_that_raises_leaves_its_regions(
    backend: Any, region: Any, installed: bool
):
    def function(x: torch.Tensor) -> torch.Tensor:
        with region("cpu", dtype=BF16):
            y = torch.mm(x, W)
            with region("cpu", dtype=FP16, cache_enabled=False):
                return torch.mm(refuse(x), W) + y

    compiled = torch.compile(function, backend=backend)
    with fastamp.install() if installed else nullcontext():
        for around in (nullcontext(), fastamp.autocast("cpu", dtype=FP16), torch.autocast("cpu")):
            with around:
                state = torch_state()
                for _ in range(2):
                    with pytest.raises(RefusalError):
                        compiled(torch.ones(8, 8))
                    assert torch_state() == state
                assert torch.equal(compiled(-torch.ones(8, 8)), function(-torch.ones(8, 8)))
                assert torch_state() == state
        if installed:
            assert fastamp._C.open_torch_regions() == 0


@pytest.mark.slow
@pytest.mark.parametrize("region", [fastamp.autocast, torch.autocast])
def test_torchs_cache_of_traced_functions_tells_dtypes_apart(tmp_path: Any, region: Any):
    """Up to torch 2.12 its keys say that autocast is on, and not in which dtype."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with (
        torch.no_grad(),
        torch._functorch.config.patch(enable_autograd_cache=True),
        torch._inductor.config.patch(fx_graph_cache=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        hits = []
        for around in (
            lambda: region("cpu", dtype=BF16),
            lambda: region("cpu", dtype=FP16),
            nullcontext,
            lambda: region("cpu", dtype=BF16),
        ):
            torch._dynamo.reset()
            counters.clear()
            with around():
                assert torch.compile(layer)(x).dtype == layer(x).dtype
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
        assert hits == [0, 0, 0, 1]
