# SPDX-License-Identifier: Apache-2.0
"""Training in fp8 ends where training in bfloat16 does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastamp
from support.float8 import float8_region, outcomes


def train(region: fastamp.autocast, x: torch.Tensor, y: torch.Tensor) -> float:
    """The loss after 60 steps. The head has 10 rows: it stays in the base dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _ in range(60):
        optimizer.zero_grad()
        with region:
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    with region, torch.no_grad():
        if region.float8 is not None:
            assert outcomes(lambda: model(x)) == ["K or N not a multiple of 16", "float8"]
        return float(criterion(model(x), y))


def test_an_mlp_on_digits_ends_within_5_percent_of_bf16s_loss():
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, digits = datasets.load_digits(return_X_y=True)
    # The same samples in each step: losses of random batches differ by more than the bound.
    x, y = torch.tensor(pixels[:512], dtype=torch.float32) / 16, torch.tensor(digits[:512])
    bf16 = train(fastamp.autocast("cpu", dtype=torch.bfloat16), x, y)
    float8 = train(float8_region(), x, y)
    assert bf16 < 0.1
    assert float8 == pytest.approx(bf16, rel=0.05)
    assert float8 != bf16
