# SPDX-License-Identifier: Apache-2.0
"""The autograd node of an fp8 product: what it saves, when it is freed, what it refuses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
from support.float8 import float8_region, outcomes, saved_bytes


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("x_grad", "weight_grad", "expected"),
    [(False, True, 16 * 32), (True, False, 48 * 32), (False, False, 0)],
)
def test_only_what_the_gradients_need_is_saved(x_grad: bool, weight_grad: bool, expected: int):
    layer = nn.Linear(32, 48).requires_grad_(weight_grad)
    layer.bias.requires_grad_()
    x = torch.randn(16, 32, requires_grad=x_grad)
    with float8_region():
        saved = saved_bytes(lambda: layer(x), [*layer.parameters(), x])
        assert saved.get(torch.float8_e4m3fn, 0) == expected
        layer(x).sum().backward()
    assert (x.grad is not None) == x_grad
    assert (layer.weight.grad is not None) == weight_grad
    assert torch.equal(layer.bias.grad, torch.full((48,), 16.0))


def test_nothing_is_recorded_without_grad_mode():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        expected = layer(x)
        with torch.no_grad():
            assert not layer(x).requires_grad
        with torch.inference_mode():
            inferred = layer(x)
            assert inferred.is_inference()
        # Casts made in inference mode serve what is recorded later in the region.
        again = layer(x)
    assert torch.equal(inferred, expected)
    again.sum().backward()
    assert x.grad is not None


def test_a_cast_made_first_in_inference_mode_can_be_saved_later():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_hooks_on_saved_tensors_are_honoured():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        grads = torch.autograd.grad(layer(x).float().square().sum(), [x, *layer.parameters()])
        return list(grads)

    with float8_region():
        expected = gradients()
        with torch.autograd.graph.save_on_cpu():
            on_cpu = gradients()
        packed: list[torch.dtype] = []

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            packed.append(tensor.dtype)
            return tensor.double(), tensor.dtype

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item[0].to(item[1])):
            hooked = gradients()
    assert packed.count(torch.float8_e4m3fn) == 2
    for found in (on_cpu, hooked):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_backward_is_the_same_inside_and_outside_the_region_and_in_another():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)

    def gradients(inside: bool, other: Any = None) -> list[torch.Tensor]:
        with float8_region():
            y = layer(x)
            if inside:
                return list(torch.autograd.grad(y.sum(), [x, *layer.parameters()]))
        if other is None:
            return list(torch.autograd.grad(y.sum(), [x, *layer.parameters()]))
        with other:
            return list(torch.autograd.grad(y.sum(), [x, *layer.parameters()]))

    expected = gradients(False)
    for found in (gradients(True), gradients(False, fastamp.autocast("cpu", dtype=torch.float16))):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_some_gradients_only():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        y = layer(x)
    inputs = [x, layer.weight, layer.bias]
    expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    for one, wanted in zip(inputs, expected, strict=True):
        (found,) = torch.autograd.grad(y.sum(), one, retain_graph=True)
        assert torch.equal(found, wanted)


def test_a_second_backward_needs_the_graph_to_be_retained():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        y = layer(x)
    y.sum().backward(retain_graph=True)
    once = layer.weight.grad.clone()
    y.sum().backward()
    assert torch.equal(layer.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.sum().backward()


def test_backward_frees_what_was_saved():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    references: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.clone()
        references.append(weakref.ref(held))
        return held

    with (
        float8_region(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        y = layer(x)
    y.sum().backward()
    gc.collect()
    assert references
    assert all(reference() is None for reference in references)


def test_edits_of_operands_after_the_product_do_not_reach_its_gradients():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    with float8_region():
        expected = torch.autograd.grad(layer(x).sum(), layer.weight)
        y = layer(x)
        x.mul_(3)
        with torch.no_grad():
            layer.weight.zero_()
        found = torch.autograd.grad(y.sum(), layer.weight)
        # The weight was edited: its cast is made again.
        assert torch.equal(layer(x), layer.bias.bfloat16().expand(16, 48))
    assert torch.equal(found[0], expected[0])


def test_a_weight_is_cast_once_per_region():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with fastamp.debug.trace() as trace:
        for _ in range(2):
            with float8_region():
                for _ in range(3):
                    layer(x)
    assert trace.totals["weight_casts"] == 2
    assert trace.totals["cache_hits"] == 4
    with fastamp.debug.trace() as trace, float8_region(cache_enabled=False):
        for _ in range(3):
            layer(x)
    assert trace.totals["weight_casts"] == 3


def test_an_optimizer_step_within_a_region_is_seen():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with float8_region():
        before = layer(x)
        before.sum().backward()
        optimizer.step()
        after = layer(x)
    with float8_region():
        assert torch.equal(after, layer(x))
    assert not torch.equal(before, after)


def test_a_weight_used_twice_sums_its_gradients():
    layer = nn.Linear(32, 32)
    x = torch.randn(16, 32)
    with float8_region():
        hidden = layer(x)
        layer(hidden).sum().backward()
    total = layer.weight.grad.clone()
    layer.zero_grad()
    with float8_region():
        hidden = layer(x).detach().requires_grad_()
        layer(hidden).sum().backward()
        layer(x).backward(hidden.grad)
    assert torch.equal(layer.weight.grad, total)


def by_batched_gradients(y: torch.Tensor, x: torch.Tensor) -> None:
    torch.autograd.grad(y, x, torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)


def by_vmap(y: torch.Tensor, x: torch.Tensor) -> None:
    torch.vmap(lambda g: torch.autograd.grad(y, x, g))(torch.ones(3, *y.shape, dtype=y.dtype))


def by_jacobian(_y: torch.Tensor, x: torch.Tensor) -> None:
    layer = nn.Linear(32, 48)
    with float8_region():
        torch.autograd.functional.jacobian(layer, x, vectorize=True)


@pytest.mark.parametrize("differentiate", [by_batched_gradients, by_vmap, by_jacobian])
def test_a_batch_of_gradients_is_refused_with_the_way_out(differentiate: Any):
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        y = layer(x)
    with pytest.raises(NotImplementedError, match=r"got a batch of them.*float8=False"):
        differentiate(y, x)
    y.sum().backward()
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    by_batched_gradients(y, x)


def test_an_activation_edited_behind_torchs_back_is_not_seen_in_its_region():
    """docs/float8.md; a buffer, which has no history, is."""
    layer = nn.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    with float8_region():
        hidden = x * 2
        first = layer(hidden)
        hidden.data.mul_(2)
        assert torch.equal(layer(hidden), first)
        hidden.detach().mul_(2)  # moves the version counter
        assert not torch.equal(layer(hidden), first)
        buffer = torch.randn(16, 32)
        first = layer(buffer)
        buffer.data.mul_(2)
        assert not torch.equal(layer(buffer), first)


@pytest.mark.parametrize("through", ["backward", "grad"])
def test_differentiating_twice_is_refused_with_the_way_out(through: str):
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert gradient.requires_grad
    differentiate = {
        "backward": lambda: gradient.sum().backward(),
        "grad": lambda: torch.autograd.grad(gradient.sum(), layer.weight, allow_unused=True),
    }[through]
    with pytest.raises(NotImplementedError, match=r"got a second .*autocast\(..., float8=False\)"):
        differentiate()
    with float8_region(), fastamp.autocast("cpu", float8=False):
        y = layer(x)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    gradient.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_recomputes_in_fp8(reentrant: bool, inside: bool):
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    x = torch.randn(16, 32, requires_grad=True)
    seen: list[str] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(str(fastamp.float8.recipe("cpu")))
        return model(hidden)

    def gradients(run: Any) -> list[torch.Tensor]:
        with float8_region():
            y = run()
            if inside:
                return list(_gradients(y))
        return list(_gradients(y))

    def _gradients(y: torch.Tensor) -> list[torch.Tensor]:
        x.grad = None
        model.zero_grad()
        y.float().square().sum().backward()
        return [x.grad, *(param.grad for param in model.parameters())]

    expected = [gradient.clone() for gradient in gradients(lambda: model(x))]
    found = gradients(lambda: checkpoint(forward, x, use_reentrant=reentrant))
    assert len(seen) == 2
    assert seen[0] == seen[1] != "None"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert fastamp.float8.recipe("cpu") is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_in_a_base_dtype_region_within_recomputes_in_the_base_dtype(reentrant: bool):
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with float8_region():
        with fastamp.autocast("cpu", float8=False):
            y = checkpoint(layer, x, use_reentrant=reentrant)
        y.sum().backward()
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.autograd.grad(layer(x).sum(), layer.weight)
    assert torch.equal(layer.weight.grad, expected[0])


def test_custom_functions_compile_without_a_graph_break():
    class Double(torch.autograd.Function):
        @staticmethod
        @fastamp.custom_fwd(device_type="cpu")
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @fastamp.custom_bwd(device_type="cpu")
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: Double.apply(x) + 1, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_custom_functions_run_backward_under_the_recipe_of_their_forward():
    weight = nn.Linear(32, 16).weight
    seen: list[Any] = []

    class Product(torch.autograd.Function):
        @staticmethod
        @fastamp.custom_fwd(device_type="cpu")
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(fastamp.float8.recipe("cpu"))
            return x @ weight.t()

        @staticmethod
        @fastamp.custom_bwd(device_type="cpu")
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(fastamp.float8.recipe("cpu"))
            return grad.float() @ weight

    x = torch.randn(4, 32, requires_grad=True)
    recipe = fastamp.float8.Recipe(fast_accumulate=(False, False, False))
    with float8_region(float8=recipe):
        y = Product.apply(x)
    assert outcomes(lambda: y.sum().backward()) == ["float8"]
    assert seen == [recipe, recipe]
    assert fastamp.float8.recipe("cpu") is None
