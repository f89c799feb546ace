# SPDX-License-Identifier: Apache-2.0
"""Weights cast to fp8 together: layouts and operands, beside autocast/test_cast_together.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fastamp
from support.float8 import E4M3, float8_region, saved_bytes


class Two(nn.Module):
    """Two layers that are used one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


X = torch.linspace(-2, 3, 16 * 32).view(16, 32)


def made(run: Callable[[], Any]) -> int:
    """Casts of weights that ``run`` makes."""
    with fastamp.debug.trace() as t:
        run()
    return t.totals["weight_casts"]


def region(model: Two) -> list[int]:
    """Casts made by the first and by the second layer in a region of their own."""
    hidden: list[torch.Tensor] = []
    with float8_region():
        first = made(lambda: hidden.append(model.first(X)))
        return [first, made(lambda: model.second(hidden[0]))]


def alone(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What a region gives that casts one by one."""
    with float8_region():
        return layer(x)


def test_only_what_was_asked_for_joins():
    model = Two()
    with fastamp.casts.together([model.first.weight]):
        region(model)
        assert region(model) == [1, 1]
    with fastamp.casts.together([model.second.weight]):
        region(model)
        assert region(model) == [1, 1]


def test_beside_the_16_bit_casts_of_a_region():
    class Mixed(Two):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(48, 7)  # Not a multiple of 16.
            self.tail = nn.Linear(7, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.head(super().forward(x)))

    model = Mixed()

    def step() -> torch.Tensor:
        with float8_region():
            return model(X)

    expected = step()
    separate = made(step)
    with fastamp.casts.together(model):
        step()
        with fastamp.debug.trace() as t:
            got = step()
    assert torch.equal(got, expected)
    assert t.totals["weight_casts"] == separate


def test_only_layouts_that_were_used_are_made():
    model = Two()
    with fastamp.casts.together(model):
        for _ in range(2):
            with torch.no_grad(), float8_region():
                model(X)
        with torch.no_grad(), float8_region(), fastamp.debug.trace() as t:
            model(X)
    weights = model.first.weight.numel() + model.second.weight.numel()
    activations = X.numel() + 16 * 32
    assert t.totals["weight_casts"] == 2
    assert t.totals["cast_bytes"] == weights + activations


def test_training_after_evaluation_gets_the_layouts_it_needs():
    model = Two()
    x = X.clone().requires_grad_()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        with float8_region():
            y = model(x)
        y.square().sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]

    expected = gradients()
    with fastamp.casts.together(model):
        for _ in range(2):
            with torch.no_grad(), float8_region():
                model(x)
        for _ in range(2):
            assert all(map(torch.equal, gradients(), expected))
        with float8_region():
            assert made(lambda: model.first(x)) == 2


def test_training_has_the_bits_and_the_saved_bytes_of_separate_casts():
    def run(together: bool) -> list[Any]:
        model = Two()
        seen: list[Any] = []
        with fastamp.casts.together(model if together else []):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(3):
                with float8_region():
                    seen.append(saved_bytes(lambda: model(X), list(model.parameters()))[E4M3])
                with float8_region():
                    y = model(X)
                y.square().mean().backward()
                seen += [y.detach(), *(p.grad.clone() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
        return seen

    own, torchs = run(together=True), run(together=False)
    assert len(own) == len(torchs)
    for a, b in zip(own, torchs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_weight_that_is_written_after_it_was_cast_ahead_is_cast_again():
    model = Two()
    with fastamp.casts.together(model):
        region(model)
        with float8_region():
            hidden = model.first(X)
            with torch.no_grad():
                model.second.weight.mul_(3)
            got = model.second(hidden)
    assert torch.equal(got, alone(model.second, hidden))


def test_excluded_weights_do_not_join():
    model = Two()
    with fastamp.casts.together(model):
        region(model)
        with fastamp.float8.exclude(model.second), float8_region():
            assert made(lambda: model.first(X)) == 1


def test_kept_weights_do_not_join():
    model = Two()
    with fastamp.casts.together(model):
        region(model)
        with fastamp.casts.keep(model.second):
            assert region(model) == [1, 1]
            assert fastamp.casts.kept().copies == 1
            assert region(model) == [1, 0]


def test_a_transposed_operand_joins():
    weight = nn.Parameter(torch.randn(32, 48))  # As transformers' Conv1D has it.
    layer = nn.Linear(32, 32)

    def step() -> torch.Tensor:
        with float8_region():
            return layer(X) @ weight

    expected = step()
    with fastamp.casts.together([layer.weight, weight]):
        step()
        with float8_region():
            assert made(lambda: layer(X)) == 2
        step()
        assert torch.equal(step(), expected)


def test_in_inference_mode():
    model = Two()
    with torch.inference_mode(), float8_region():
        expected = model(X)
    with fastamp.casts.together(model), torch.inference_mode():
        region(model)
        assert region(model) == [2, 0]
        with float8_region():
            assert torch.equal(model(X), expected)
    with fastamp.casts.together(model):
        assert region(model) == [2, 1]  # Backward needs a layout more.
        assert region(model) == [2, 0]
        with float8_region():
            y = model(X)
        y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
