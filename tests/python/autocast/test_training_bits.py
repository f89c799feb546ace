# SPDX-License-Identifier: Apache-2.0
"""Small models of several kinds train bit for bit as with torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.autocast_state import TORCH_LOSES_GRADIENTS, torch_kernels
from support.small_models import Recurrent


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), MeanHead())


class MeanHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.PReLU(),
        nn.ConvTranspose2d(4, 2, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def cells() -> nn.Module:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(8, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.head(state[0])

    return Cells()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm cells": cells,
    "transformer": transformer,
}


def train(
    make: Callable[[], nn.Module], region: Any, dtype: torch.dtype, steps: int = 4
) -> list[torch.Tensor]:
    """Losses, last gradients and weights of a short run; backward partly inside the region."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 6, 8)
    target = torch.randint(4, (16,))
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        with region("cpu", dtype=dtype):
            out = model(x)
            assert out.dtype == dtype
            loss = nn.functional.cross_entropy(out, target)
            if step % 2:
                (loss * 8).backward()
        if not step % 2:
            (loss * 8).backward()
        seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return seen + [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_training_gives_torchs_bits(name: str, dtype: torch.dtype):
    try:
        with torch_kernels():
            expected = train(MODELS[name], torch.autocast, dtype)
    except RuntimeError:
        # oneDNN has no float16 LSTM on some CPUs, where torch refuses. fastamp's runs; whether its
        # values are right is the business of test_unsupported_by_torch.py.
        if name != "lstm":
            raise
        assert all(value.isfinite().all() for value in train(MODELS[name], fastamp.autocast, dtype))
        return
    for region in (fastamp.autocast, torch.autocast):
        got = train(MODELS[name], region, dtype)
        assert len(got) == len(expected)
        for own, torchs in zip(got, expected, strict=True):
            assert own.dtype == torchs.dtype
            assert torch.equal(own, torchs)


def evaluate_and_train(make: Callable[[], nn.Module]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(16, 6, 8)
    with fastamp.autocast("cpu"):
        with torch.no_grad():
            evaluated = model(x)
        if TORCH_LOSES_GRADIENTS and not fastamp._C.kernels_registered():
            torch.clear_autocast_cache()
        trained = model(x)
    trained.float().sum().backward()
    return [evaluated, trained.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_no_grad_evaluation_between_steps_changes_nothing(name: str):
    try:
        with torch_kernels():
            expected = evaluate_and_train(MODELS[name])
    except RuntimeError:
        # oneDNN has no bfloat16 LSTM on some CPUs either.
        if name != "lstm":
            raise
        assert all(value.isfinite().all() for value in evaluate_and_train(MODELS[name]))
        return
    results = evaluate_and_train(MODELS[name])
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
