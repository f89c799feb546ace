# SPDX-License-Identifier: Apache-2.0
"""The policy "unify" in compiled and exported code: graphs hold the casts that eager calls get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastamp
from support.autocast_state import cuda_state
from support.mixed_calls import FUNCTIONS, ROWS, WRITES, randn

BF16, FP32 = torch.bfloat16, torch.float32
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def unify_and_fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with fastamp.policies.preset("unify"):
        yield
    fastamp.policies.reset()


def in_region(call: Function) -> Function:
    def run(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return call(*args)

    return run


def compiled(call: Function, backend: Any = "aot_eager", **options: Any) -> Function:
    function: Function = torch.compile(in_region(call), backend=backend, fullgraph=True, **options)
    return function


def results(call: Function, dtypes: tuple[torch.dtype, ...], grads: bool) -> list[Any]:
    """What a call returns, and the gradients of its arguments."""
    arguments = [randn(4, 4, dtype=dtype).requires_grad_(grads) for dtype in dtypes]
    found = call(*arguments)
    if grads and found.requires_grad:
        found.float().sum().backward()
    return [found.detach(), *(each.grad for each in arguments)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_call_is_the_eager_one(name: str, grads: bool):
    call, dtypes = FUNCTIONS[name][0], (FP32, BF16) if grads else (BF16, FP32)
    assert_same(results(compiled(call), dtypes, grads), results(in_region(call), dtypes, grads))


@pytest.mark.parametrize("name", WRITES)
def test_compiled_code_writes_what_eager_code_writes(name: str):
    def call(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        WRITES[name](x, value[:2])
        return x

    dtypes = FP32, BF16
    assert_same(results(compiled(call), dtypes, False), results(in_region(call), dtypes, False))


def mixture(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Calls that are refused, and calls that are not."""
    out = torch.zeros_like(x)
    out.lerp_(y @ y, 0.5)
    return torch.lerp(x, y, 0.5) + out * y


@pytest.mark.slow
def test_inductor():
    expected = results(in_region(mixture), (FP32, BF16), True)
    found = results(compiled(mixture, "inductor"), (FP32, BF16), True)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def calls_in(graph: torch.fx.GraphModule, op: Any) -> list[tuple[torch.dtype, ...]]:
    """The dtypes of the tensors that calls of an op in a graph are given."""
    nodes = [node for node in graph.graph.nodes if node.target is op]
    return [tuple(each.meta["val"].dtype for each in node.all_input_nodes) for node in nodes]


def test_a_refused_call_is_in_no_graph():
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:  # noqa: ARG001
        graphs.append(graph)
        return graph

    from functorch.compile import aot_module_simplified

    compiled(
        lambda a, b: torch.lerp(a, b, 0.5) + a,
        lambda graph, inputs: aot_module_simplified(graph, inputs, fw_compiler=keep),
    )(randn(4), randn(4, dtype=BF16))
    assert len(graphs) == 1
    assert calls_in(graphs[0], torch.ops.aten.lerp.Scalar) == [(BF16, BF16)]
    assert calls_in(graphs[0], torch.ops.aten.add.Tensor) == [(BF16, FP32)]


def test_sizes_that_change_need_one_graph():
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    function = compiled(lambda a, b: a.index_add(0, ROWS, b[:2] * 2), keep, dynamic=True)
    for rows in (5, 9, 17):
        assert function(randn(rows, 3), randn(rows, 3, dtype=BF16)).dtype == BF16
    assert len(graphs) == 1
    torch._dynamo.reset()
    function = compiled(lambda a, b: torch.lerp(a, b, 0.5), "aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 9, 17):
            assert function(randn(rows, 3), randn(rows, 3, dtype=BF16)).dtype == BF16


def test_sizes_that_nobody_knows():
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.where(y[:, 0] > 0)[0]
        return x.index_add(0, rows, y[rows])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same(
            results(compiled(call), (FP32, BF16), False),
            results(in_region(call), (FP32, BF16), False),
        )


def test_a_mask_of_zeros_takes_no_values():
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x[:, 0] > 0] = y[x[:, 0] > 0]
        return x

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same(
            results(compiled(call), (FP32, BF16), False),
            results(in_region(call), (FP32, BF16), False),
        )


def test_the_policy_of_the_process_is_that_of_the_graph():
    function = compiled(lambda a, b: torch.index_add(a, 0, ROWS, b[:2]))
    given = randn(4, 4), randn(4, 4, dtype=BF16)
    assert function(*given).dtype == BF16
    with fastamp.policies.preset("torch"), pytest.raises(RuntimeError, match="same scalar type"):
        function(*given)
    assert function(*given).dtype == BF16


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str):
    given = randn(4, 4), randn(4, 4, dtype=BF16)
    graph = make_fx(in_region(mixture), tracing_mode=mode)(*given)
    assert torch.equal(graph(*given), in_region(mixture)(*given))
    assert len(calls_in(graph, torch.ops.aten.lerp.Scalar)) == 1


class Mixture(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = in_region(mixture)(x, y)
        return found


def test_export():
    given = randn(4, 4), randn(4, 4, dtype=BF16)
    program = torch.export.export(Mixture(), given)
    assert torch.equal(program.module()(*given), Mixture()(*given))


def test_export_of_bytecode_records_calls_above_autocast():
    given = randn(4, 4), randn(4, 4, dtype=BF16)
    with pytest.raises(RuntimeError, match=r"expected dtype torch\.float32 for `end`"):
        torch.export.export(Mixture(), given, strict=True)


def test_compiling_draws_no_random_numbers():
    given = randn(4, 4), randn(4, 4, dtype=BF16).abs()
    torch.manual_seed(0)
    expected = in_region(torch.normal)(*given)
    torch.manual_seed(0)
    assert torch.equal(compiled(torch.normal)(*given), expected)


def test_compiling_changes_no_argument():
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.index_add_(0, ROWS, y[:2])
        return x

    x, y = randn(4, 4), randn(4, 4, dtype=BF16)
    expected = in_region(call)(x.clone(), y)
    compiled(call)(x, y)
    assert torch.equal(x, expected)


def test_a_device_that_is_not_there():
    with FakeTensorMode(), cuda_state(BF16):
        a = torch.empty(4, 4, device="cuda")
        graph = make_fx(lambda x, y: torch.lerp(x, y, 0.5))(a, a.bfloat16())
    used = [node for node in graph.graph.nodes if node.op != "output" and node.users]
    lerps = [node for node in used if node.target is torch.ops.aten.lerp.Scalar]
    assert [node.meta["val"].dtype for node in lerps] == [BF16]
