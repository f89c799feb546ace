# SPDX-License-Identifier: Apache-2.0
"""Training in fp8 ends where training in bfloat16 does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastamp
from support.float8 import float8_region, outcomes


def train(seed: int, region: fastamp.autocast, x: torch.Tensor, y: torch.Tensor) -> float:
    """The loss over all data after 200 steps. The head has 10 rows: it stays in the carrier."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _ in range(200):
        batch = torch.randint(0, len(x), (128,))
        optimizer.zero_grad()
        with region:
            loss = criterion(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    with region, torch.no_grad():
        if region.float8 is not None:
            assert outcomes(lambda: model(x)) == ["K or N not a multiple of 16", "float8"]
        return float(criterion(model(x), y))


def test_an_mlp_on_digits_ends_within_5_percent_of_bf16s_loss():
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, digits = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    # The mean of three seeds: one run's noise is as large as the bound.
    means = [
        sum(train(seed, region, x, y) for seed in range(3)) / 3
        for region in (fastamp.autocast("cpu", dtype=torch.bfloat16), float8_region())
    ]
    assert means[0] < 0.05
    assert means[1] == pytest.approx(means[0], rel=0.05)
