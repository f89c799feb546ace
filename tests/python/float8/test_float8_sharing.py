# SPDX-License-Identifier: Apache-2.0
"""fp8 casts that several products use: one activation's, and those of weights that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.float8 import E4M3, float8_region, saved_bytes


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    assert fastamp.casts.kept().copies == 0
    yield
    assert fastamp.casts.kept().copies == 0


def events(function: Callable[[], Any]) -> dict[str, int]:
    with fastamp.debug.trace() as trace:
        function()
    totals = trace.totals
    names = ("weight_casts", "other_casts", "cache_hits", "activation_hits", "kept_hits")
    return {name: totals[name] for name in names if totals[name]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.q(h) * self.k(h) + self.v(h)


def test_query_key_and_value_share_the_cast_of_their_input():
    model, x = Attention(), torch.randn(16, 32)
    with float8_region():
        counts = events(lambda: model(x))
    assert counts == {"weight_casts": 3, "other_casts": 1, "activation_hits": 2}
    with float8_region():
        saved = saved_bytes(lambda: model(x), list(model.parameters()))[E4M3]
    # Their input has no second copy; the weights are three.
    assert saved == 16 * 32 + 3 * 48 * 32


def test_sharing_changes_no_bit():
    model, x = Attention(), torch.randn(16, 32)
    results = []
    for share in (True, False):
        model.zero_grad()
        with float8_region(cache_enabled=share):
            y = model(x)
        y.sum().backward()
        results.append([y, *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_an_activation_that_is_written_is_cast_again():
    first, second = nn.Linear(32, 48), nn.Linear(32, 48)
    base = torch.randn(16, 32, requires_grad=True)
    with float8_region():
        h = base * 1.0
        first(h)
        with torch.no_grad():
            h.mul_(2.0)
        got = second(h)
    with float8_region():
        expected = second(base * 2.0)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t.view(16, 64), lambda t: t[:16]])
def test_other_views_of_one_memory_are_other_activations(make: Any):
    base = torch.randn(32, 32, requires_grad=True)
    with float8_region():
        h = base * 1.0
        nn.Linear(32, 16)(h)
        viewed = make(h)
        layer = nn.Linear(viewed.size(-1), 16)
        got = layer(viewed)
    with float8_region():
        expected = layer(make(base.detach()))
    assert torch.equal(got, expected)


def test_inputs_without_a_history_are_cast_each_time():
    first, second = nn.Linear(32, 48), nn.Linear(32, 48)
    x = torch.randn(16, 32)
    with float8_region():
        first(x)
        x.numpy()[:] *= 2.0  # No version counter shows this.
        got = second(x)
    with float8_region():
        assert torch.equal(got, second(x.clone()))


def test_a_use_that_needs_a_gradient_more_is_cast_again_and_correct():
    frozen, trained = nn.Linear(32, 48).requires_grad_(False), nn.Linear(32, 48)
    base = torch.randn(16, 32, requires_grad=True)
    with float8_region():
        h = base * 1.0
        frozen(h)  # Needs no transpose of h.
        trained(h).sum().backward()
    got = trained.weight.grad.clone()
    trained.zero_grad()
    with float8_region():
        trained(base * 1.0).sum().backward()
    assert torch.equal(got, trained.weight.grad)


def test_the_last_activation_is_let_go_when_the_region_ends():
    layer = nn.Linear(32, 48)
    region = float8_region()
    region.__enter__()
    h = torch.randn(16, 32, requires_grad=True) * 1.0
    counts = events(lambda: (layer(h), layer(h)))
    assert counts["activation_hits"] == 1
    region.__exit__(None, None, None)
    with float8_region():
        counts = events(lambda: layer(h))
    assert "activation_hits" not in counts


def test_kept_casts_outlive_their_region():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)

    def step() -> torch.Tensor:
        with float8_region():
            return layer(x)

    with fastamp.casts.keep(layer):
        assert events(step) == {"weight_casts": 1, "other_casts": 1}
        kept = fastamp.casts.kept()
        assert kept == (1, 2 * 48 * 32 + 4)  # Both layouts and a scale.
        assert events(step) == {"kept_hits": 1, "other_casts": 1}
        assert torch.equal(step(), step())
        before = step()
        with torch.no_grad():
            layer.weight.mul_(2.0)
        assert events(step) == {"weight_casts": 1, "other_casts": 1}
        assert not torch.equal(step(), before)
        assert fastamp.casts.kept() == kept


def test_training_and_evaluation_take_turns_at_one_kept_cast():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)

    def evaluate() -> None:
        with torch.no_grad(), float8_region():
            layer(x)

    def train() -> None:
        with float8_region():
            layer(x).sum().backward()

    with fastamp.casts.keep(layer):
        evaluate()
        train()  # Makes the second layout.
        assert fastamp.casts.kept() == (1, 2 * 48 * 32 + 4)
        for again in (evaluate, train, evaluate, train):
            assert "weight_casts" not in events(again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_frozen_weights_of_any_dtype_are_kept_on_request(dtype: torch.dtype):
    base = nn.Linear(32, 48, bias=False, dtype=dtype).requires_grad_(False)
    adapter = nn.Linear(32, 48, bias=False)
    x = torch.randn(16, 32, requires_grad=True)

    def step() -> torch.Tensor:
        with float8_region():
            return base(x) + adapter(x)

    expected = step()
    with fastamp.casts.keep(base):
        assert torch.equal(step(), expected)
        counts = events(lambda: step().sum().backward())
    assert (counts["kept_hits"], counts["weight_casts"]) == (1, 1)  # The adapter's.
    assert base.weight.grad is None


@pytest.mark.parametrize("op", ["mm", "matmul", "addmm"])
@pytest.mark.parametrize("transposed", [False, True])
def test_frozen_weights_as_second_operands_run_in_fp8_if_their_casts_are_kept(
    op: str, transposed: bool
):
    weight = torch.randn(48, 32) if transposed else torch.randn(32, 48)
    x, bias = torch.randn(16, 32), torch.randn(48)

    def run() -> torch.Tensor:
        operand = weight.t() if transposed else weight
        if op == "addmm":
            return torch.addmm(bias, x, operand)
        return getattr(torch, op)(x, operand)

    def outcome() -> str:
        with fastamp.debug.trace() as trace, float8_region():
            run()
        (row,) = (row for row in trace.rows if row.float8)
        return row.float8

    assert outcome() == "second operand is no weight"
    with fastamp.casts.keep([weight]):
        assert outcome() == "float8"
        with float8_region():
            got = run()
    trained = weight.clone().requires_grad_()
    weight = trained
    with float8_region():
        assert torch.equal(got, run().detach())


def test_kept_casts_serve_inference_mode_and_are_no_inference_tensors():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with fastamp.casts.keep(layer):
        with torch.inference_mode(), float8_region():
            inferred = layer(x)
        with float8_region():
            trained = layer(x)
        trained.sum().backward()
    assert torch.equal(inferred, trained)
    assert layer.weight.grad is not None


def test_an_optimizer_step_makes_kept_casts_stale():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    outputs = []
    with fastamp.casts.keep(layer):
        for _ in range(3):
            with float8_region():
                loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outputs.append(loss.item())
    assert outputs[0] > outputs[1] > outputs[2]


def test_dropping_and_dying_frees_kept_casts():
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    request = fastamp.casts.keep(layer)
    with float8_region():
        layer(x)
    assert fastamp.casts.kept().copies == 1
    fastamp.casts.drop(layer)
    assert fastamp.casts.kept().copies == 0
    with float8_region():
        layer(x)
    assert fastamp.casts.kept().copies == 1
    del layer
    assert fastamp.casts.kept().copies == 0
    request.release()
