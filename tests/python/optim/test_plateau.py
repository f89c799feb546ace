# SPDX-License-Identifier: Apache-2.0
"""A fine-tune of bfloat16 weights: it stalls under torch.optim, and not with masters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastamp

LEARNING_RATE = 3e-5  # one update is far below half a unit of a bfloat16 weight
STEPS = 300


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    steps: int,
) -> float:
    """Trains, and returns the loss over all data in float32."""
    x, y = data
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        batch = torch.randint(len(x), (256,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch].to(dtype)).float(), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model.float()(x), y).item()


@pytest.fixture(scope="module")
def losses() -> dict[str, float]:
    """Losses before and after a fine-tune of float32 and of bfloat16 weights."""
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, digits = datasets.load_digits(return_X_y=True)
    data = (torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    before = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data, 60)

    def tune(dtype: torch.dtype, fused: bool) -> float:
        tuned = copy.deepcopy(model).to(dtype)
        optimizer = torch.optim.AdamW(tuned.parameters(), lr=LEARNING_RATE)
        if fused:
            fastamp.optim.fuse_(optimizer)
        return train(tuned, optimizer, data, STEPS)

    return {
        "before": before,
        "float32": tune(torch.float32, False),
        "torch.optim": tune(torch.bfloat16, False),
        "fuse_": tune(torch.bfloat16, True),
    }


def test_torchs_step_rounds_most_of_the_progress_away(losses):
    progress = losses["before"] - losses["float32"]
    assert progress > 0.02  # else there is nothing to see
    assert losses["before"] - losses["torch.optim"] < 0.5 * progress


def test_fused_steps_make_the_progress_of_float32_weights(losses):
    progress = losses["before"] - losses["float32"]
    assert losses["before"] - losses["fuse_"] == pytest.approx(progress, rel=0.05)
