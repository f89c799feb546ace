# SPDX-License-Identifier: Apache-2.0
"""Compiled functions in fp8 regions: eager's bits, guards on the recipe, no recompilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import fastamp
from support.float8 import E4M3, E5M2, float8_region

BF16, FP16 = torch.bfloat16, torch.float16
OTHER = fastamp.float8.Recipe(grad_dtype=E4M3)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.long])]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs what aot_autograd has traced, and keeps it."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._keeping(self.forward), bw_compiler=self._keeping(self.backward)
        )

    @staticmethod
    def _keeping(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        return compiler

    def products(self) -> list[int]:
        """Products in fp8 of each graph, forward before backward."""
        return [names(graph).count("aten._scaled_mm.default") for graph in self.all]

    @property
    def all(self) -> list[torch.fx.GraphModule]:
        return [*self.forward, *self.backward]


def names(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def model_of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), *layers, nn.Linear(64, 48))


def results(model: Any, parameters: Any, x: torch.Tensor, **region: Any) -> list[torch.Tensor]:
    """Output and gradients. Of the output as well as of the parameters, all with many bits."""
    x = x.clone().requires_grad_()
    with float8_region(**region):
        y = model(x)
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(y.shape, generator=generator) * torch.randn(y.shape, generator=generator)
    found = torch.autograd.grad(y, [x, *parameters], grad.exp().to(y.dtype))
    return [y.detach(), *found]


def gradients(function: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The same by backward(), which reentrant checkpoints ask for."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with float8_region():
        y = function(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for own, torchs in zip(found, expected, strict=True):
        assert own.dtype == torchs.dtype
        assert torch.equal(own, torchs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [16, 17])
def test_compiled_training_has_eagers_bits(backend: str, rows: int):
    model = model_of()
    x = torch.randn(rows, 32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = results(model, list(model.parameters()), x)
    same(results(compiled, list(model.parameters()), x), expected)
    with fastamp.autocast("cpu", dtype=BF16):
        assert not torch.equal(model(x), expected[0])


def test_graphs_hold_ops_of_torch_alone():
    graphs, model, x = Graphs(), model_of(), torch.randn(17, 32)
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    results(compiled, list(model.parameters()), x)
    assert graphs.products() == [2, 4]
    for graph in graphs.all:
        assert all(name.startswith(("aten.", "<built-in", "prims.")) for name in names(graph))
    saved = [
        node.meta["val"]
        for node in graphs.forward[0].graph.find_nodes(op="output")[0].args[0]
        if isinstance(node, torch.fx.Node)
    ]
    assert sum(tensor.dtype == E4M3 for tensor in saved) > 0


FUNCTIONS = {
    "linear": lambda x, w, b: nn.functional.linear(x, w, b),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "mm": lambda x, w, b: torch.mm(x, w.t()) + b,
    "matmul": lambda x, w, b: (x.reshape(1, *x.shape) @ w.t())[0] + b,
    "conv1d": lambda x, w, b: torch.addmm(b, x, w),
}


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("x_dtype", [torch.float32, BF16, FP16])
@pytest.mark.parametrize("recipe", [fastamp.float8.Recipe(), OTHER])
def test_each_op_compiles_to_eagers_bits(op: str, x_dtype: torch.dtype, recipe: Any):
    sizes = (32, 48) if op == "conv1d" else (48, 32)
    weight, bias = nn.Parameter(torch.randn(sizes)), nn.Parameter(torch.randn(48))
    x = torch.randn(21, 32).to(x_dtype)
    graphs = Graphs()
    function = FUNCTIONS[op]
    compiled = torch.compile(function, backend=graphs.backend, fullgraph=True)

    def run(function: Any) -> list[torch.Tensor]:
        return results(lambda x: function(x, weight, bias), [weight, bias], x, float8=recipe)

    same(run(compiled), run(function))
    assert graphs.products() == [1, 2]


@pytest.mark.parametrize("op", FUNCTIONS)
def test_each_op_compiles_without_gradients(op: str):
    sizes = (32, 48) if op == "conv1d" else (48, 32)
    weight, bias = nn.Parameter(torch.randn(sizes)), nn.Parameter(torch.randn(48))
    x, graphs = torch.randn(5, 32), Graphs()
    compiled = torch.compile(FUNCTIONS[op], backend=graphs.backend, fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), float8_region():
            expected = FUNCTIONS[op](x, weight, bias)
            assert torch.equal(compiled(x, weight, bias), expected)
    assert graphs.products() == [1] * len(graphs.all)


def test_inf_and_nan_compile_to_eagers_bits():
    layer, x = nn.Linear(32, 16), torch.randn(16, 32)
    x[1, 2], x[3, 4], x[5] = float("inf"), float("nan"), 0
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with float8_region():
        expected, found = layer(x), compiled(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_steps_do_not_recompile():
    model, x = model_of(), torch.randn(20, 32)
    optimizer = fastamp.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = fastamp.GradScaler("cpu")
    twin = model_of()
    twin.load_state_dict(model.state_dict())
    twin_optimizer = fastamp.optim.AdamW(twin.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def step(function: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with float8_region():
            loss = function(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    losses = []
    for number in range(6):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = step(compiled, optimizer)
        assert torch.equal(found, step(twin, twin_optimizer))
        losses.append(float(found))
    assert losses[-1] < losses[0]
    for own, torchs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, torchs)


def test_rows_are_dynamic():
    counter = CompileCounterWithBackend("aot_eager")
    model = model_of()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (17, 16, 40, 3, 160):
        x = torch.randn(rows, 32)
        expected = results(model, list(model.parameters()), x)
        same(results(compiled, list(model.parameters()), x), expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.long
def test_inductor_takes_dynamic_rows():
    counter = CompileCounterWithBackend("inductor")
    model = nn.Linear(32, 48)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (17, 32, 197):
        x = torch.randn(rows, 32)
        expected = results(model, list(model.parameters()), x)
        same(results(compiled, list(model.parameters()), x), expected)
    assert counter.frame_count == 1


def test_frozen_weights_and_inputs():
    model, x = model_of(), torch.randn(17, 32)
    model[0].requires_grad_(False)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)

    def run(function: Any) -> list[torch.Tensor]:
        with float8_region():
            y = function(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), model[2].parameters())]

    same(run(compiled), run(model))
    assert graphs.products() == [2, 1]


@pytest.mark.parametrize("where", ["before", "after"])
def test_excluded_weights_stay_in_the_base_dtype(where: str):
    model, x, graphs = model_of(), torch.randn(17, 32), Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    parameters = list(model.parameters())
    if where == "after":
        same(results(compiled, parameters, x), results(model, parameters, x))
        assert graphs.products() == [2, 4]
    with fastamp.float8.exclude(model[2]):
        same(results(compiled, parameters, x), results(model, parameters, x))
        assert graphs.products() == ([1, 2] if where == "before" else [2, 1, 4, 2])
    same(results(compiled, parameters, x), results(model, parameters, x))
    assert graphs.products()[len(graphs.forward) - 1] == 2


def test_what_backward_multiplies_stays_in_the_base_dtype():
    """aot_autograd traces backward in the region, which an eager program has left by then."""
    layer = nn.Linear(32, 48, bias=False).bfloat16()
    recipe, graphs = fastamp.float8.Recipe(ops=("mm",)), Graphs()
    compiled = torch.compile(layer, backend=graphs.backend, fullgraph=True)
    x, parameters = torch.randn(17, 32).bfloat16(), list(layer.parameters())
    expected = results(layer, parameters, x, float8=recipe)
    same(results(compiled, parameters, x, float8=recipe), expected)
    assert graphs.products() == [0, 0]


def test_an_excluded_conv1d_is_found_through_its_transpose():
    weight, x, graphs = nn.Parameter(torch.randn(16, 32)), torch.randn(4, 32), Graphs()
    compiled = torch.compile(lambda x: x @ weight.t(), backend=graphs.backend)
    with fastamp.float8.exclude([weight]), float8_region():
        assert torch.equal(compiled(x), x @ weight.t())
    assert sum(graphs.products()) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_compile_to_eagers_bits(reentrant: bool):
    model, x, graphs = model_of(), torch.randn(17, 32), Graphs()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant) * 1

    compiled = torch.compile(forward, backend=graphs.backend)
    parameters = list(model.parameters())
    same(results(compiled, parameters, x), results(model, parameters, x))
    assert graphs.products()[0] == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(results(compiled, parameters, x), results(model, parameters, x))


def test_checkpoints_around_compiled_code_have_eagers_bits():
    model, x = model_of(), torch.randn(17, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = gradients(model, model, x)
    for reentrant in (False, True):

        def forward(x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=reentrant)

        same(gradients(forward, model, x), expected)


def test_a_graph_break_keeps_the_recipe():
    model, x, graphs = model_of(), torch.randn(17, 32), Graphs()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model[1](model[0](x))
        torch._dynamo.graph_break()
        return model[2](x)

    compiled = torch.compile(forward, backend=graphs.backend)
    parameters = list(model.parameters())
    same(results(compiled, parameters, x), results(model, parameters, x))
    assert sorted(graphs.products()) == [1, 1, 2, 2]


def test_regions_of_torch_inside_keep_or_suspend_the_recipe():
    layer, x, graphs = nn.Linear(32, 16), torch.randn(4, 32), Graphs()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=BF16):
            keeps = layer(x)
        with torch.autocast("cpu", dtype=FP16):
            other = layer(x)
        with torch.autocast("cpu", enabled=False):
            off = layer(x)
        with fastamp.autocast("cpu"):
            keeps_too = layer(x)
        return keeps, other, off, keeps_too

    compiled = torch.compile(forward, backend=graphs.backend, fullgraph=True)
    with float8_region(), torch.no_grad():
        same(list(compiled(x)), list(forward(x)))
    assert graphs.products() == [2]


ENDING = [
    lambda: fastamp.autocast("cpu", dtype=BF16),
    lambda: fastamp.autocast("cpu", BF16),
    lambda: fastamp.autocast("cpu", dtype=BF16, float8=False),
    lambda: fastamp.autocast("cpu", dtype=BF16, float8=OTHER),
]


@pytest.mark.parametrize("make", ENDING)
@pytest.mark.parametrize("ready", [False, True])
def test_regions_inside_that_end_or_set_a_recipe_do_what_eager_does(make: Any, ready: bool):
    layer, x = nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    made = make()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = layer(x)
        with made if ready else make():
            inside = layer(x)
        return before, inside, layer(x)

    compiled = torch.compile(forward, backend="aot_eager")
    for _ in range(2):
        for region in (float8_region(), fastamp.autocast("cpu", dtype=BF16)):
            with region:
                found, expected = compiled(x), forward(x)
            same(list(found), list(expected))
            grads = [torch.autograd.grad(y[1].float().sum(), x)[0] for y in (found, expected)]
            assert torch.equal(*grads)


@pytest.mark.slow
def test_torchs_cache_of_traced_functions_tells_recipes_apart(tmp_path: Any):
    """Its keys know neither the recipe nor the dtype of a region."""
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    with (
        torch.no_grad(),
        torch._functorch.config.patch(enable_autograd_cache=True),
        torch._inductor.config.patch(fx_graph_cache=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        for region in (
            lambda: fastamp.autocast("cpu", dtype=BF16),
            float8_region,
            lambda: float8_region(
                float8=fastamp.float8.Recipe(forward_dtype=E5M2, grad_dtype=E4M3)
            ),
            float8_region,
        ):
            torch._dynamo.reset()
            with region():
                assert torch.equal(torch.compile(layer)(x), layer(x))
        torch._dynamo.reset()
        with fastamp.float8.exclude(layer), float8_region():
            assert torch.equal(torch.compile(layer)(x), layer(x))
