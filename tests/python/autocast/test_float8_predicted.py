# SPDX-License-Identifier: Apache-2.0
"""Float8Recipe(scale="predicted"): scales that the last step predicts, and what they may change."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
from support.float8 import float8_region

PREDICTED = fastamp.Float8Recipe(scale="predicted")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def near_one(*sizes: int) -> torch.Tensor:
    """Values of three binades: none of them underflows in fp8, whatever scale there is."""
    return (torch.rand(sizes) * 0.875 + 0.125) * torch.randint(0, 2, sizes).mul(2).sub(1)


def step(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, recipe: Any) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with float8_region(float8=recipe):
        y = layer(x)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("factors", [(1, 1, 1), (1, 4, 1 / 4), (1, 2.0**20, 2.0**-20), (8, 1, 8)])
def test_no_scale_is_wrong_whatever_came_before(factors: tuple[float, ...]):
    layer = nn.Linear(32, 48)
    x, grad = near_one(17, 32), near_one(17, 48)
    for factor in factors:
        got = step(layer, x * factor, grad * factor, PREDICTED)
        expected = step(layer, x * factor, grad * factor, True)
        assert all(map(torch.equal, got, expected))


def test_a_prediction_is_used_where_it_fits():
    layer = nn.Linear(32, 48, bias=False)
    grad = near_one(16, 48)
    tiny = near_one(16, 32)
    tiny[0, 0] = 1.0
    tiny[1:] *= 2.0**-16  # Subnormal in e4m3fn: a scale half as large rounds them otherwise.
    current = step(layer, tiny, grad, True)
    first, second = (step(layer, tiny, grad, PREDICTED) for _ in range(2))
    assert all(map(torch.equal, first, current))  # Nothing is known before the first step.
    assert not torch.equal(second[0], current[0])
    torch.testing.assert_close(second[0][0], current[0][0])


def test_each_parameter_has_predictions_of_its_own():
    small, large = nn.Linear(32, 48), nn.Linear(32, 48)
    x, grad = near_one(16, 32), near_one(16, 48)
    for _ in range(2):
        for layer, factor in ((small, 2.0**-10), (large, 2.0**10)):
            got = step(layer, x * factor, grad * factor, PREDICTED)
            expected = step(layer, x * factor, grad * factor, True)
            assert all(map(torch.equal, got, expected))


def test_inf_and_nan_stay_in_their_rows():
    layer = nn.Linear(32, 48)
    x, grad = near_one(16, 32), near_one(16, 48)
    step(layer, x, grad, PREDICTED)
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    (got, *_), (expected, *_) = (step(layer, x, grad, recipe) for recipe in (PREDICTED, True))
    assert torch.equal(got.isnan(), expected.isnan())
    assert got.isnan().any(dim=1).tolist() == [row in (3, 4) for row in range(16)]
    clean = step(layer, near_one(16, 32), grad, PREDICTED)
    assert all(tensor.isfinite().all() for tensor in clean)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_with_predicted_scales(reentrant: bool):
    layer = nn.Linear(32, 48)
    x, grad = near_one(16, 32), near_one(16, 48)

    def run(x: torch.Tensor) -> torch.Tensor:
        with float8_region(float8=PREDICTED):
            return layer(x)

    expected = step(layer, x, grad, True)
    for _ in range(2):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = checkpoint(run, leaf, use_reentrant=reentrant)
        y.backward(grad.bfloat16())
        got = [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]
        assert all(map(torch.equal, got, expected))


def test_state_dicts_know_nothing_of_predictions():
    layer = nn.Linear(32, 48)
    before = list(layer.state_dict())
    step(layer, near_one(16, 32), near_one(16, 48), PREDICTED)
    assert list(layer.state_dict()) == before == ["weight", "bias"]


def test_threads_may_share_a_parameter():
    layer = nn.Linear(32, 48).requires_grad_()
    x = near_one(64, 32)
    with float8_region(float8=True):
        expected = {factor: layer(x * factor) for factor in (1.0, 2.0**12)}
    wrong: list[float] = []

    def work(factor: float) -> None:
        for _ in range(100):
            with float8_region(float8=PREDICTED):
                if not torch.equal(layer(x * factor), expected[factor]):
                    wrong.append(factor)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_rule_expects_a_read_less_of_activations_and_gradients():
    model = nn.Linear(4096, 4096)
    with torch.device("meta"):
        x = torch.empty(8192, 4096)
    gains = [
        fastamp.float8_plan(model, x, gpu="H200 SXM", recipe=recipe).gain
        for recipe in (fastamp.Float8Recipe(), PREDICTED)
    ]
    assert 1.0 < gains[0] < gains[1] < 1.75


@pytest.mark.parametrize(
    ("kind", "scale", "text"),
    [
        (ValueError, "delayed", "expected scale to be 'current' or 'predicted', got 'delayed'"),
        (TypeError, True, "expected scale to be a str, got bool True"),
    ],
)
def test_other_scales_are_refused(kind: type[Exception], scale: Any, text: str):
    with pytest.raises(kind, match=f"^Float8Recipe: {text}"):
        fastamp.Float8Recipe(scale=scale)


def test_the_recipe_in_force_says_its_scale():
    with float8_region(float8=PREDICTED):
        assert fastamp.float8_recipe("cpu") == PREDICTED
